"""Faults of hand-made programs: a statement, another in its place, and words of the report."""

from __future__ import annotations

from tests.support.ptx_bodies import (
    ARRIVE,
    BULK,
    COPY,
    EXPECT,
    INIT,
    PRODUCT,
    SEND,
    SEND_TILE,
    SIGNAL,
    SUM,
    TILE,
    TRY,
)

UNSEEN = "is not ordered after the write"
UNREAD = "is not ordered after the read"
LATE = "is not ordered after the store"
FENCE = "has no fence.proxy.async after the write"
OUT = "bytes of shared memory"
ALIGN = "at no multiple of"
PART = "is executed by a part of it"
ELEMENT = "belong to no element"
NOWHERE = "which is in no tensor"
UNSET = "to which nothing was written"
HANG = "deadlock"
ENDS = "it ends before"
NEVER = "which no instruction sets"
TWICE = "by two threads at once"

# By program: a statement, another in its place, and words of the report. `+x` adds x behind it.
FAULTS: dict[str, list[tuple[str, str, str]]] = {
    "exchange": [
        ("bar.sync 0;", "", UNSEEN),
        ("bar.sync 1;", "", UNREAD),
        ("bar.sync 0;", "bar.sync 0, 32;", UNSEEN),
        ("bar.sync 1;", "bar.sync 1, 32;", UNREAD),
        ("bar.sync 0;", "bar.sync 0, 96;", HANG),
        ("bar.sync 0;", "bar.sync 16;", "there are barriers 0 to 15"),
        ("bar.sync 0;", "bar.sync 0, 40;", "for multiples of 32 threads"),
        ("bar.sync 0;", "bar.sync 0, 0;", "for multiples of 32 threads"),
        ("bar.sync 0;", "@%p1 bar.sync 0;", PART),
        ("bar.sync 0;", "@%p2 bar.sync 0;", UNSEEN),
        ("bar.sync 0;", "bar.arrive 0, 64;", UNSEEN),
        ("bar.sync 0;", "selp.b32 %r7, 2, 3, %p2; bar.sync %r7;", HANG),
        ("bar.sync 0;", "selp.b32 %r7, 64, 96, %p2; bar.sync 0, %r7;", "is for 96 threads here"),
        ("bar.sync 0;", "bar.warp.sync -1;", UNSEEN),
        ("bar.sync 0;", "fence.proxy.async;", UNSEEN),
        ("st.shared.b32 [%r3], %r2;", "", UNSET),
        ("st.shared.b32 [%r3], %r2;", "@%p2 st.shared.b32 [%r3], %r2;", UNSET),
        ("st.shared.b32 [%r3], %r2;", "st.shared.b16 [%r3], 7;", UNSET),
        ("st.shared.b32 [%r3], %r2;", "st.shared.b32 [%r3+2], %r2;", ALIGN),
        ("st.shared.b32 [%r3], %r2;", "st.shared.b32 [%r3+16384], %r2;", OUT),
        ("st.shared.b32 [%r3], %r2;", "st.shared.b32 [%r3+-16], %r2;", OUT),
        ("st.shared.b32 [%r3], %r2;", "+st.shared.b32 [%r1], %r0;", UNSEEN),
        (
            "st.shared.b32 [%r3], %r2;",
            "+st.shared.b32 [%r3+4], %r0;",
            LATE.replace("store", "write"),
        ),
        ("st.shared.b32 [%r3], %r2;", "st.shared.b32 [%r3], %r50;", NEVER),
        ("ld.shared.b32 %r6, [%r5];", "ld.shared.b32 %r6, [%r5+256];", UNSET),
        ("ld.shared.b32 %r6, [%r5];", "ld.shared.b32 %r6, [%r5+1];", ALIGN),
        ("ld.shared.b32 %r6, [%r5];", "ld.shared.b32 %r6, [%r5+16200];", OUT),
        ("ld.shared.b32 %r6, [%r5];", "ld.shared.v4.b32 {%r6, %r7, %r10, %r11}, [%r5];", ALIGN),
        ("ld.global.b32 %r2, [%d8];", "ld.global.b32 %r2, [%d8+4096];", ELEMENT),
        ("ld.global.b32 %r2, [%d8];", "ld.global.b32 %r2, [%d8+3];", ALIGN),
        ("st.global.b32 [%d9], %r6;", "st.global.b32 [%d1], %r0;", TWICE),
        ("st.global.b32 [%d9], %r6;", "st.global.b32 [%d9+100000000000], %r6;", NOWHERE),
        ("st.global.b32 [%d9], %r6;", "st.global.b32 [%d9], %r51;", NEVER),
        ("st.global.b32 [%d9], %r6;", "+st.global.b32 [%d9+4], %r0;", LATE),
        ("st.global.b32 [%d9], %r6;", "st.global.b32 [%d9+1026], %r6;", ALIGN),
        ("st.global.b32 [%d9], %r6;", "st.global.b32 [%d9+2048], %r6;", ELEMENT),
    ],
    "turns": [
        ("bar.sync 3, 64;", "", UNSEEN),
        ("bar.sync 3, 64;", "bar.sync 4, 64;", HANG),
        ("bar.sync 3, 64;", "bar.sync 3, 96;", "is for"),
        ("bar.arrive 3, 64;", "", HANG),
        ("bar.arrive 3, 64;", "bar.arrive 3, 32;", "is for"),
        (
            "bar.arrive 3, 64;",
            "bar.arrive 3, 64; bar.arrive 3, 64;",
            "it ends while warps are awaited",
        ),
        ("bar.arrive 3, 64;", "+@%p2 st.shared.b32 [%r3], %r9;", "not ordered after the"),
        ("bar.arrive 3, 64;", "bar.arrive 17, 64;", "there are barriers 0 to 15"),
        ("ld.shared.b32 %r6, [%r3+-128];", "ld.shared.b32 %r6, [%r3];", UNSET),
        (
            "@%p2 st.shared.b32 [%r3], %r0;",
            "st.shared.b32 [%r1], 5; @%p2 st.shared.b32 [%r3], %r0;",
            "not ordered after the write",
        ),
    ],
    "phases": [
        (f"@%p1 {INIT} [%r1+512], 32;", "", "no mbarrier is at byte 512"),
        (f"@%p1 {INIT} [%r1+512], 32;", f"@%p1 {INIT} [%r1+512], 0;", "an mbarrier of 0 arrivals"),
        (
            f"@%p1 {INIT} [%r1+512], 32;",
            f"@%p1 {INIT} [%r1+512], 1048576;",
            "an mbarrier of 1048576",
        ),
        (f"@%p1 {INIT} [%r1+512], 32;", f"@%p1 {INIT} [%r1+512], 33;", HANG),
        (
            f"@%p1 {INIT} [%r1+512], 32;",
            f"@%p1 {INIT} [%r1+512], 31;",
            "expects 30 arrivals|in use",
        ),
        (f"@%p1 {INIT} [%r1+512], 32;", f"@%p1 {INIT} [%r1+516], 32;", ALIGN),
        (
            f"@%p1 {INIT} [%r1+512], 32;",
            f"@%p1 {INIT} [%r1+520], 32;",
            "no mbarrier is at byte 512",
        ),
        ("bar.sync 0;", "", "no mbarrier|use of shared memory, bytes 512"),
        ("bar.sync 0;", "bar.sync 0, 32;", "use of shared memory, bytes 512 to 515 is not ordered"),
        (f"{ARRIVE} _, [%r1+512];", "", HANG),
        (f"{ARRIVE} _, [%r1+512];", f"@%p1 {ARRIVE} _, [%r1+512];", HANG),
        (f"{ARRIVE} _, [%r1+512];", f"{ARRIVE} _, [%r1+512], 2;", HANG),
        (f"{ARRIVE} _, [%r1+512];", f"+{ARRIVE} _, [%r1+512];", HANG),
        (f"{ARRIVE} _, [%r1+512];", "+st.shared.b32 [%r3], %r9;", "not ordered after the"),
        (f"{ARRIVE} _, [%r1+512];", f"{EXPECT} _, [%r1+512], 16;", HANG),
        (f"{ARRIVE} _, [%r1+512];", f"{ARRIVE} _, [%r1+504];", "no mbarrier is at byte 504"),
        (f"{TRY} %p3, [%r1+512], 0;", "", "not ordered|nothing was written"),
        (f"{TRY} %p3, [%r1+512], 0;", f"{TRY} %p3, [%r1+512], 1;", HANG),
        (f"{TRY} %p3, [%r1+512], 0;", f"+{TRY} %p3, [%r1+512], 1;", HANG),
        ("st.shared.b32 [%r3], %r0;", "", UNSET),
        ("st.shared.b32 [%r3], %r0;", f"{ARRIVE} _, [%r1+512]; st.shared.b32 [%r3], %r0;", HANG),
        (
            "ld.shared.b32 %r6, [%r3+-128];",
            "+st.shared.b64 [%r1+512], %d7;",
            f"{TWICE}|in use|over",
        ),
        (
            "@%p1 mbarrier.inval.shared::cta.b64 [%r1+512];",
            "mbarrier.inval.shared::cta.b64 [%r1+512];",
            "no mbarrier is at byte 512",
        ),
        ("bar.sync 1;", "", "use|in use|not ordered|no mbarrier"),
    ],
    "copies": [
        ("cp.async.wait_group 1;", "", UNSEEN),
        ("cp.async.wait_group 1;", "cp.async.wait_group 2;", UNSEEN),
        ("cp.async.wait_group 0;", "", UNSEEN),
        ("cp.async.wait_group 0;", "cp.async.wait_group 1;", UNSEEN),
        ("cp.async.commit_group;", "", UNSEEN),
        ("bar.sync 0;", "", UNSEEN),
        ("bar.sync 1;", "", UNSEEN),
        (f"{COPY} [%r3], [%d8], 4;", "", UNSET),
        (
            f"{COPY} [%r3], [%d8], 4;",
            "+st.global.b32 [%d8], %r0;",
            "not ordered after the read by an async",
        ),
        (
            f"{COPY} [%r3+1024], [%d8+256], 4;",
            "+st.global.b32 [%d8+256], %r0;",
            "not ordered after the read",
        ),
        (
            "cp.async.wait_group 1;",
            "+st.global.b32 [%d8+256], %r0;",
            "not ordered after the read by an async",
        ),
        (f"{COPY} [%r3], [%d8], 4;", f"{COPY} [%r3], [%d8+4096], 4;", ELEMENT),
        (f"{COPY} [%r3], [%d8], 4;", f"{COPY} [%r3], [%d8+2], 4;", ALIGN),
        (f"{COPY} [%r3], [%d8], 4;", f"{COPY} [%r3+16384], [%d8], 4;", OUT),
        (f"{COPY} [%r3], [%d8], 4;", f"{COPY} [%r3+2], [%d8], 4;", ALIGN),
        (f"{COPY} [%r3], [%d8], 4;", f"{COPY} [%r3], [%d8], 4, 8;", "cp.async of 8 bytes to 4"),
        (
            f"{COPY} [%r3], [%d8], 4;",
            "+st.shared.b32 [%r3], %r0;",
            "not ordered after the write by an async",
        ),
        (
            f"{COPY} [%r3], [%d8], 4;",
            "+ld.shared.b32 %r6, [%r3];",
            "not ordered after the write by an async",
        ),
        (
            f"{COPY} [%r3], [%d8], 4;",
            f"+{COPY} [%r3], [%d8+512], 4;",
            "not ordered after the write by an async",
        ),
        (
            "st.global.b32 [%d9], %r6;",
            f"+{COPY} [%r3+2048], [%d8], 4;",
            "it ends before a copy has landed",
        ),
        (
            "st.global.b32 [%d9], %r6;",
            f"+{COPY} [%r3], [%d8+512], 4;",
            "it ends before a copy has landed",
        ),
    ],
    "counted copies": [
        (f"{TRY} %p3, [%r1+512], 0;", "", UNSEEN),
        (f"{TRY} %p3, [%r1+512], 0;", f"{TRY} %p3, [%r1+512], 1;", UNSEEN),
        (f"@%p1 {INIT} [%r1+512], 64;", f"@%p1 {INIT} [%r1+512], 65;", HANG),
        (f"@%p1 {INIT} [%r1+512], 64;", f"@%p1 {INIT} [%r1+512], 32;", f"{UNSEEN}|expects"),
        ("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+512];", "", HANG),
        (
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+512];",
            "+st.global.b32 [%d8], %r0;",
            "not ordered after the read by an async",
        ),
        (
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+512];",
            f"+{COPY} [%r3], [%d8], 4;",
            "not ordered after the write|before a copy has landed",
        ),
        (f"{COPY} [%r3], [%d8], 4;", "", UNSET),
        ("bar.sync 0;", "", "no mbarrier|not ordered"),
    ],
    "bulk load": [
        ("fence.proxy.async.global;", "", "has no fence.proxy.async after the store by warp 0"),
        (
            "fence.proxy.async.global;",
            "fence.proxy.async.shared::cta;",
            "has no fence.proxy.async after the store by warp 0",
        ),
        (f"{TRY} %p3, [%r1+512], 0;", "", UNSEEN),
        (f"{TRY} %p3, [%r1+512], 0;", f"{TRY} %p3, [%r1+512], 1;", UNSEEN),
        (f"@%p1 {EXPECT} _, [%r1+512], 272;", "", "lands in a later phase|counts|deadlock"),
        (
            f"@%p1 {EXPECT} _, [%r1+512], 272;",
            f"@%p1 {EXPECT} _, [%r1+512], 256;",
            "later phase|before a copy",
        ),
        (f"@%p1 {EXPECT} _, [%r1+512], 272;", f"@%p1 {EXPECT} _, [%r1+512], 288;", HANG),
        (
            f"@%p1 {EXPECT} _, [%r1+512], 272;",
            f"{EXPECT} _, [%r1+512], 272;",
            "not one more|deadlock",
        ),
        (f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];", "", HANG),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"{BULK} [%r1], [%d0], 256, [%r1+512];",
            "not ordered after the write",
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1], [%d0], 248, [%r1+512];",
            "not a multiple of 16",
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1+8], [%d0], 256, [%r1+512];",
            ALIGN,
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1], [%d0+8], 256, [%r1+512];",
            ALIGN,
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1], [%d0+4096], 256, [%r1+512];",
            ELEMENT,
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1+16352], [%d0], 256, [%r1+512];",
            OUT,
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+520];",
            "no mbarrier is at byte 520",
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            f"@%p1 {BULK} [%r1+512], [%d0], 256, [%r1+512];",
            "not ordered|in use|no fence",
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            "+@%p1 st.shared.b32 [%r1], %r9;",
            "not ordered after the write by a copy of the copy engine",
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            "+@%p1 st.global.b32 [%d0], %r9;",
            "not ordered after the read by a copy of the copy engine",
        ),
        (
            f"@%p1 {BULK} [%r1], [%d0], 256, [%r1+512];",
            "+@!%p2 st.global.b32 [%d8], %r9;",
            "not ordered after the read by a copy of the copy engine",
        ),
        (
            f"@%p1 {BULK} [%r1+1024], [%d0+1008], 16, [%r1+512];",
            f"@%p1 {BULK} [%r1+240], [%d0+1008], 16, [%r1+512];",
            "not ordered after the write by a copy",
        ),
        ("bar.sync 0;", "", "no mbarrier|use of shared memory"),
        (f"@%p1 {INIT} [%r1+512], 1;", f"@%p1 {INIT} [%r1+512], 2;", HANG),
    ],
    "tile load": [
        ("fence.proxy.async.global;", "", "has no fence.proxy.async after the store by warp 0"),
        (f"{TRY} %p3, [%r1+512], 0;", "", UNSEEN),
        (
            f"@%p1 {EXPECT} _, [%r1+512], 128;",
            f"@%p1 {EXPECT} _, [%r1+512], 64;",
            "later phase|deadlock",
        ),
        (f"@%p1 {EXPECT} _, [%r1+512], 128;", f"@%p1 {EXPECT} _, [%r1+512], 192;", HANG),
        (
            "mov.b32 %r20, 0;",
            "mov.b32 %r20, 0; add.s64 %d21, %d21, 64;",
            "is not the address of a parameter",
        ),
        (
            f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];",
            f"@%p1 {TILE} [%r1+16], [%d21, {{%r20, %r20}}], [%r1+512];",
            ALIGN,
        ),
        (
            f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];",
            "+@%p1 st.global.b32 [%d0], %r9;",
            "not ordered after the read by a copy of the copy engine",
        ),
        (
            f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];",
            "+@!%p2 st.global.b32 [%d8+-128], %r9;",
            "not ordered after the",
        ),
        (
            f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];",
            f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20, %r20}}], [%r1+512];",
            "3 coordinates for a tensor map of 2",
        ),
        (f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];", "", HANG),
        (
            f"@%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];",
            f"{TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];",
            "not ordered after the write by a copy",
        ),
    ],
    "bulk store": [
        ("fence.proxy.async.shared::cta;", "", FENCE),
        ("fence.proxy.async.shared::cta;", "+st.shared.b32 [%r3], %r0;", FENCE),
        ("fence.proxy.async.shared::cta;", "fence.proxy.async.global;", FENCE),
        ("bar.sync 0;", "", f"{UNSEEN}|nothing was written"),
        ("bar.sync 0;", "fence.proxy.async; bar.warp.sync -1;", f"{UNSEEN}|nothing was written"),
        ("@%p1 cp.async.bulk.wait_group 0;", "", UNREAD),
        ("@%p1 cp.async.bulk.wait_group 0;", "@%p1 cp.async.bulk.wait_group 1;", UNREAD),
        (
            "@%p1 cp.async.bulk.wait_group 0;",
            "@%p1 cp.async.bulk.wait_group.read 0;",
            "a load of bytes of out is not ordered after the store by a bulk store of warp 0",
        ),
        ("@%p1 cp.async.bulk.commit_group;", "", UNREAD),
        ("bar.sync 1;", "", UNREAD),
        (f"@%p1 {SEND} [%d1], [%r1], 256;", f"@%p1 {SEND} [%d1], [%r1], 512;", UNSET),
        (f"@%p1 {SEND} [%d1], [%r1], 256;", f"@%p1 {SEND} [%d1+2040], [%r1], 256;", ALIGN),
        (
            f"@%p1 {SEND} [%d1], [%r1], 256;",
            f"@%p1 {SEND} [%d1+4000], [%r1], 256;",
            ELEMENT,
        ),
        (f"@%p1 {SEND} [%d1], [%r1], 256;", f"@%p1 {SEND} [%d1], [%r1+4], 256;", ALIGN),
        (
            f"@%p1 {SEND} [%d1], [%r1], 256;",
            f"@%p1 {SEND} [%d1], [%r1], 40;",
            "not a multiple of 16",
        ),
        (
            f"@%p1 {SEND} [%d1], [%r1], 256;",
            "+@%p1 ld.global.b32 %r6, [%d1];",
            "a load of bytes of out is not ordered after the store by a bulk store",
        ),
        (
            f"@%p1 {SEND} [%d1], [%r1], 256;",
            "+@%p1 st.global.b32 [%d1+4], %r9;",
            "not ordered after the store of other bytes by a bulk store",
        ),
        (f"@%p1 {SEND} [%d1], [%r1], 256;", "+@%p1 st.shared.b32 [%r1], %r9;", UNREAD),
        (
            f"@%p1 {SEND} [%d1], [%r1], 256;",
            f"+@%p1 {SEND} [%d1], [%r1+16], 240;",
            "not ordered after the store of other bytes by a bulk store",
        ),
        (
            "st.shared.b32 [%r3], %r0;",
            "+@%p1 st.global.b32 [%d1], 77;",
            "has no fence.proxy.async after the store",
        ),
        ("st.global.b32 [%d8], %r6;", f"+@%p1 {SEND} [%d1], [%r1], 16;", f"{FENCE}|{UNSEEN}"),
    ],
    "tile store": [
        ("fence.proxy.async.shared::cta;", "", FENCE),
        ("@%p1 cp.async.bulk.wait_group 0;", "", UNREAD),
        (
            "@%p1 cp.async.bulk.wait_group 0;",
            "@%p1 cp.async.bulk.wait_group.read 0;",
            "a load of bytes of x is not ordered after the store by a bulk store of warp 0",
        ),
        (
            f"@%p1 {SEND_TILE} [%d21, {{%r20, %r20}}], [%r1];",
            "+@%p1 ld.global.b32 %r6, [%d0];",
            "a load of bytes of x is not ordered after the store by a bulk store",
        ),
        (
            f"@%p1 {SEND_TILE} [%d21, {{%r20, %r20}}], [%r1];",
            "+@%p1 st.global.b32 [%d0+64], %r9;",
            "not ordered after the store of other bytes by a bulk store",
        ),
        (
            f"@%p1 {SEND_TILE} [%d21, {{%r20, %r20}}], [%r1];",
            f"@%p1 {SEND_TILE} [%d21, {{%r20, %r20}}], [%r1+1024];",
            UNSET,
        ),
        (
            "@%p2 st.shared.b32 [%r3], %r0;",
            "+@%p1 st.global.b32 [%d0+4], 77;",
            "has no fence.proxy.async after the store",
        ),
        (
            f"@%p1 {SEND_TILE} [%d21, {{%r20, %r20}}], [%r1];",
            f"@%p1 {SEND_TILE} [%d21, {{%r20}}], [%r1];",
            "1 coordinates for a tensor map of 2 axes",
        ),
    ],
    "bulk sum": [
        ("fence.proxy.async.shared::cta;", "", FENCE),
        ("bar.sync 0;", "", f"{UNSEEN}|nothing was written"),
        ("@%p1 cp.async.bulk.wait_group.read 0;", "", UNREAD),
        ("bar.sync 1;", "", UNREAD),
        (
            "st.shared.b32 [%r3], %r0;",
            "+@%p1 ld.global.b32 %r6, [%d1];",
            "a load of bytes of out is not ordered after the store by a bulk store|added to by",
        ),
        (
            "st.shared.b32 [%r3], %r0;",
            "+st.global.b32 [%d9], %r0;",
            "not ordered after the store|added to by",
        ),
        (
            f"@%p1 {SUM} [%d1], [%r1], 256;",
            f"@%p1 {SEND} [%d1], [%r1], 256; @%p1 st.global.b32 [%d1+1024], %r9;",
            "several programs store equal bytes",
        ),
        (
            "bar.sync 0;",
            "+@%p1 ld.global.b32 %r6, [%d1];",
            "a sum to bytes of out read by program|added to by",
        ),
    ],
    "rows": [
        ("st.global.b32 [%d9], %r2;", "st.global.b32 [%d1], %r0;", TWICE),
        (
            "st.global.b32 [%d9], %r2;",
            "@%p1 st.global.b32 [%d1], %r9;",
            "stored by program (0, 0, 0)",
        ),
        (
            "st.global.b32 [%d9], %r2;",
            "+@%p1 st.global.b32 [%d9+256], 9;",
            "stored by program (0, 0, 0)",
        ),
        (
            "st.global.b32 [%d9], %r2;",
            "@%p1 st.global.b32 [%d1], 7;",
            "several programs store equal bytes",
        ),
        (
            "ld.global.b32 %r4, [%d0+1020];",
            "ld.global.b32 %r4, [%d0];",
            "stored by program (0, 0, 0)",
        ),
        (
            "ld.global.b32 %r4, [%d0+1020];",
            "ld.global.b32 %r4, [%d8+256];",
            "read by several programs",
        ),
        (
            "ld.global.b32 %r4, [%d0+1020];",
            "ld.global.b32 %r4, [%d0+512];",
            "read by several programs",
        ),
        (
            "st.global.b32 [%d8], %r2;",
            "+@%p1 st.global.b32 [%d0+1020], %r2;",
            "read by program|stored by|several",
        ),
        (
            "st.global.b32 [%d8], %r2;",
            "+setp.eq.b32 %p4, %r9, 2; @%p4 st.global.b32 [%d0+1020], %r2;",
            "read by several programs|" + TWICE,
        ),
        (
            "st.global.b32 [%d8], %r2;",
            "+setp.eq.b32 %p4, %r9, 2; and.pred %p4, %p4, %p1; @%p4 st.global.b32 [%d0+1020], %r2;",
            "read by several programs",
        ),
    ],
    "back and forth": [
        ("bar.sync 0;", "", "a load of bytes of out is not ordered after the store by warp"),
        (
            "bar.sync 0;",
            "bar.sync 0, 32;",
            "a load of bytes of out is not ordered after the store by warp",
        ),
        (
            "bar.sync 0;",
            "@%p2 bar.arrive 2, 64; @!%p2 bar.sync 2, 64;",
            "a load of bytes of out is not ordered after the store by warp 1",
        ),
        ("st.global.b32 [%d9], %r0;", "+st.global.b32 [%d9+4], %r9;", LATE),
    ],
    "lanes": [
        (
            "shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;",
            "@%p4 shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;",
            "skip an instruction whose mask",
        ),
        (
            "shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;",
            "shfl.sync.bfly.b32 %r4, %r0, 1, 31, 65535;",
            "which does not name them",
        ),
        (
            "@%p4 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 65535;",
            "@%p4 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 131071;",
            "skip an instruction whose mask",
        ),
        (
            "@%p4 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 65535;",
            "@%p4 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 32767;",
            "which does not name them",
        ),
        (
            "@%p4 vote.sync.any.pred %p5, %p1, 65535;",
            "@%p4 vote.sync.any.pred %p5, %p1, -1;",
            "skip an instruction whose mask",
        ),
        (
            "@%p4 vote.sync.any.pred %p5, %p1, 65535;",
            "vote.sync.any.pred %p5, %p1, 65535;",
            "which does not name them",
        ),
        ("@%p4 bar.warp.sync 65535;", "@%p4 bar.warp.sync -1;", "skip an instruction whose mask"),
        ("@%p4 bar.warp.sync 65535;", "bar.warp.sync 65535;", "which does not name them"),
        (
            "redux.sync.add.s32 %r6, %r0, -1;",
            "mov.b32 %r6, 0; @%p4 redux.sync.add.s32 %r6, %r0, -1;",
            "skip an instruction whose mask",
        ),
        (
            "redux.sync.add.s32 %r6, %r0, -1;",
            "redux.sync.add.s32 %r6, %r0, 1;",
            "which does not name them",
        ),
        ("redux.sync.add.s32 %r6, %r0, -1;", "redux.sync.add.s32 %r6, %r60, -1;", NEVER),
    ],
    "registers": [
        ("setmaxnreg.dec.sync.aligned.u32 24;", "", HANG),
        ("setmaxnreg.dec.sync.aligned.u32 24;", "setmaxnreg.dec.sync.aligned.u32 32;", HANG),
        (
            "setmaxnreg.dec.sync.aligned.u32 24;",
            "setmaxnreg.dec.sync.aligned.u32 16;",
            "not a multiple of 8 from 24",
        ),
        (
            "setmaxnreg.dec.sync.aligned.u32 24;",
            "setmaxnreg.dec.sync.aligned.u32 28;",
            "not a multiple of 8 from 24",
        ),
        (
            "setmaxnreg.dec.sync.aligned.u32 24;",
            "setmaxnreg.dec.sync.aligned.u32 184;",
            "of a warp that has 168",
        ),
        ("setmaxnreg.inc.sync.aligned.u32 184;", "setmaxnreg.inc.sync.aligned.u32 192;", HANG),
        (
            "setmaxnreg.inc.sync.aligned.u32 184;",
            "setmaxnreg.inc.sync.aligned.u32 264;",
            "not a multiple of 8 from 24",
        ),
        (
            "setmaxnreg.inc.sync.aligned.u32 184;",
            "setmaxnreg.inc.sync.aligned.u32 160;",
            "of a warp that has 168",
        ),
        ("setmaxnreg.dec.sync.aligned.u32 24;", "@%p1 setmaxnreg.dec.sync.aligned.u32 24;", PART),
    ],
    "tensor memory": [
        ("tcgen05.wait::ld.sync.aligned;", "", "tcgen05.ld without tcgen05.wait::ld"),
        ("tcgen05.wait::st.sync.aligned;", "", "not ordered after the write by tcgen05.st"),
        ("bar.sync 0;", "", "not ordered after the write|nothing was written"),
        ("bar.sync 1;", "", "not ordered after the|are not|allocated"),
        (
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
            "",
            "it ends with 32 columns",
        ),
        (
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;",
            "given back but not taken",
        ),
        (
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
            "given back but not taken",
        ),
        (
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;",
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 32, 32;",
            "given back but not taken",
        ),
        (
            "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
            "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 48;",
            "tcgen05.alloc of 48 columns",
        ),
        (
            "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
            "@%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
            "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
            "after the permit is relinquished",
        ),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};",
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+32], {%r0};",
            "are allocated",
        ),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};",
            "ld.shared.b32 %r2, [%r1]; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};",
            "has no access to lane 0",
        ),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};",
            "@%p1 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};",
            PART,
        ),
    ],
    "tensor core": [
        ("fence.proxy.async.shared::cta;", "", FENCE),
        ("bar.sync 0;", "", "not ordered after the|no mbarrier|are allocated|nothing"),
        (
            f"{TRY} %p3, [%r1+8200], 0;",
            "",
            "not ordered after the read by a tensor core|by a tensor core",
        ),
        (f"{TRY} %p3, [%r1+8200], 0;", f"{TRY} %p3, [%r1+8200], 1;", "by a tensor core"),
        (f"@%p1 {SIGNAL} [%r1+8200];", "", HANG),
        (
            f"@%p1 {SIGNAL} [%r1+8200];",
            "+@%p1 st.shared.b32 [%r4], %r9;",
            "not ordered after the read by a tensor core",
        ),
        (f"@%p1 {SIGNAL} [%r1+8200];", f"@%p1 {SIGNAL} [%r1+8208];", "no mbarrier is at byte 8208"),
        (f"@%p1 {INIT} [%r1+8200], 1;", f"@%p1 {INIT} [%r1+8200], 2;", HANG),
        ("st.shared.v4.b32 [%r4], {%r2, %r2, %r2, %r2};", "", "not ordered|nothing was written"),
        ("bar.sync 1;", "", "not ordered after the|allocated"),
        ("tcgen05.wait::ld.sync.aligned;", "", "tcgen05.ld without tcgen05.wait::ld"),
        (
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;",
            "",
            "it ends with 32 columns",
        ),
        ("bar.sync 0;", "+st.shared.v4.b32 [%r4], {%r2, %r2, %r2, %r2};", f"{FENCE}|not ordered"),
    ],
    "warp group": [
        ("fence.proxy.async.shared::cta;", "", FENCE),
        ("bar.sync 0;", "", f"{UNSEEN}|nothing was written"),
        ("wgmma.wait_group.sync.aligned 0;", "", "before the wait for a product"),
        (
            "wgmma.wait_group.sync.aligned 0;",
            "wgmma.wait_group.sync.aligned 1;",
            "before the wait for a product",
        ),
        ("wgmma.commit_group.sync.aligned;", "", "before the wait for a product"),
        (
            "wgmma.commit_group.sync.aligned;",
            "+add.s32 %r18, %r10, %r0;",
            "is read before the wait for the product",
        ),
        (
            "wgmma.commit_group.sync.aligned;",
            "+mov.b32 %r11, 0;",
            "is set before the wait for a product that sets",
        ),
        (
            "wgmma.commit_group.sync.aligned;",
            "+mov.b32 %r15, 0;",
            "is set before the wait for a product that reads",
        ),
        (
            "wgmma.commit_group.sync.aligned;",
            "+st.shared.b32 [%r1], %r9;",
            "not ordered after the read by a product",
        ),
        ("bar.sync 1;", "", "not ordered after the read by a product"),
        ("st.shared.v4.b32 [%r4], {%r2, %r2, %r2, %r2};", "", UNSET),
        (
            "st.global.b32 [%d9], %r18;",
            "+wgmma.fence.sync.aligned; st.shared.b32 [%r1], %r9; "
            f"{PRODUCT} {{%r10, %r11, %r12, %r13}}, {{%r14, %r15, %r16, %r17}}, %d20, 1, 1, 1, 0;",
            "not ordered|no fence",
        ),
        ("wgmma.fence.sync.aligned;", "@%p1 wgmma.fence.sync.aligned;", PART),
    ],
}

# Edits that leave a program without a fault, and why.
SURVIVORS: dict[str, list[tuple[str, str, str]]] = {
    "exchange": [
        ("bar.sync 0;", "bar.sync 15;", "any of 16 barriers does"),
        (
            "bar.sync 0;",
            "bar.sync 0; bar.sync 0;",
            "the second one orders what the first has ordered",
        ),
        ("st.global.b32 [%d9], %r6;", "+st.global.b32 [%d9], %r9;", "a warp's stores are in order"),
    ],
    "copies": [
        ("cp.async.wait_group 1;", "cp.async.wait_all;", "it waits for more than is needed"),
        (
            f"{COPY} [%r3], [%d8], 4;",
            f"{COPY} [%r3], [%d8], 4, 2;",
            "the rest is filled with zeros",
        ),
    ],
    "tile store": [
        ("bar.sync 1;", "", "the warp that waits for the copy is the one that goes on"),
        ("@%p1 cp.async.bulk.commit_group;", "+@%p1 cp.async.bulk.commit_group;", "an empty group"),
    ],
    "rows": [
        (
            "ld.global.b32 %r4, [%d0+1020];",
            "ld.global.b32 %r4, [%d0+768];",
            "no program stores there",
        ),
        (
            "st.global.b32 [%d8], %r2;",
            "@%p2 st.global.b32 [%d8+128], %r2;",
            "a warp reads, another stores to one place of global memory: not modelled",
        ),
        (
            "st.global.b32 [%d9], %r2;",
            "st.global.b32 [%d9+4], %r9;",
            "its neighbour's row is its own",
        ),
    ],
    "back and forth": [
        ("bar.sync 1;", "", "the places that are stored to after it are of a third part"),
        (
            "st.global.b32 [%d11+512], %r4;",
            "st.global.b32 [%d9], %r9;",
            "each warp stores to its own places, read before a barrier",
        ),
    ],
    "registers": [
        (
            "setmaxnreg.inc.sync.aligned.u32 184;",
            "setmaxnreg.inc.sync.aligned.u32 176;",
            "fewer registers than are free",
        ),
    ],
    "lanes": [
        (
            "@%p4 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 65535;",
            "shfl.sync.bfly.b32 %r5, %r0, 33, 31, -1;",
            "only five bits of the lane count",
        ),
    ],
    "tensor memory": [
        (
            "bar.sync 0;",
            "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+4], 64; bar.sync 0;"
            "ld.shared.b32 %r21, [%r1+4];"
            "@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r21, 64;",
            "a program may allocate twice",
        ),
    ],
    "tensor core": [
        (
            f"{TRY} %p3, [%r1+8200], 0;",
            f"fence.proxy.async;{TRY} %p3, [%r1+8200], 0;",
            "a fence more than is needed",
        ),
    ],
    "warp group": [
        (
            "wgmma.wait_group.sync.aligned 0;",
            "wgmma.wait_group.sync.aligned 0; wgmma.fence.sync.aligned;",
            "a fence more than is needed",
        ),
    ],
}

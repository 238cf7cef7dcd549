"""Programs in PTX without a fault, into which tests put faults."""

from __future__ import annotations

from typing import final

from attrs import frozen

HERE = (  # addresses: %d8 of x, %d9 of out, %r3 of shared memory, each of the thread's own number
    "mul.wide.u32 %d7, %r0, 4; add.s64 %d8, %d0, %d7; add.s64 %d9, %d1, %d7;"
    " mov.b32 %r1, global_smem; mad.lo.s32 %r3, %r0, 4, %r1; setp.eq.b32 %p1, %r0, 0;"
    " setp.lt.u32 %p2, %r0, 32; mov.u32 %r9, %ctaid.x;\n"
)
ARRIVE = "mbarrier.arrive.shared::cta.b64"
TRY = "mbarrier.try_wait.parity.shared::cta.b64"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64"
INIT = "mbarrier.init.shared::cta.b64"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
TILE = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
SEND = "cp.async.bulk.global.shared::cta.bulk_group"
SUM = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
SEND_TILE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
COPY = "cp.async.ca.shared.global"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
WIDE = "tcgen05.mma.cta_group::1.kind::f16"
SIGNAL = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"


@final
@frozen
class Body:
    """Statements, one a line, and how they are run; x is an input, out a result, of 256 numbers."""

    text: str
    threads: int = 64
    programs: int = 1


TURN = "xor.b32 %r4, %r0, 32; mad.lo.s32 %r5, %r4, 4, %r1;"  # the place of the other warp's thread
BODIES = {
    "exchange": Body(
        """ld.global.b32 %r2, [%d8];
        st.shared.b32 [%r3], %r2;
        bar.sync 0;
        xor.b32 %r4, %r0, 32; mad.lo.s32 %r5, %r4, 4, %r1;
        ld.shared.b32 %r6, [%r5];
        bar.sync 1;
        st.shared.b32 [%r3], %r6;
        st.global.b32 [%d9], %r6;"""
    ),
    "turns": Body(  # one warp stores, the other loads
        """@%p2 st.shared.b32 [%r3], %r0;
        @%p2 bra first;
        bar.sync 3, 64;
        ld.shared.b32 %r6, [%r3+-128];
        st.global.b32 [%d9], %r6;
        bra last;
        first:
        bar.arrive 3, 64;
        last:
        bar.sync 0;"""
    ),
    "phases": Body(  # one warp stores and arrives, the other waits and loads, twice
        f"""@%p1 {INIT} [%r1+512], 32;
        bar.sync 0;
        @!%p2 bra second;
        st.shared.b32 [%r3], %r0;
        {ARRIVE} _, [%r1+512];
        bra done;
        second:
        {TRY} %p3, [%r1+512], 0;
        ld.shared.b32 %r6, [%r3+-128];
        st.global.b32 [%d9], %r6;
        done:
        bar.sync 1;
        @%p1 mbarrier.inval.shared::cta.b64 [%r1+512];"""
    ),
    "copies": Body(  # cp.async of two groups, read by the other warp
        f"""{COPY} [%r3], [%d8], 4;
        cp.async.commit_group;
        {COPY} [%r3+1024], [%d8+256], 4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        bar.sync 0;
        {TURN}
        ld.shared.b32 %r6, [%r5];
        cp.async.wait_group 0;
        bar.sync 1;
        ld.shared.b32 %r7, [%r5+1024];
        st.global.b32 [%d8+256], %r7;
        add.s32 %r6, %r6, %r7;
        st.global.b32 [%d9], %r6;"""
    ),
    "counted copies": Body(  # cp.async that arrives at an mbarrier
        f"""@%p1 {INIT} [%r1+512], 64;
        bar.sync 0;
        {COPY} [%r3], [%d8], 4;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+512];
        {TRY} %p3, [%r1+512], 0;
        {TURN}
        ld.shared.b32 %r6, [%r5];
        st.global.b32 [%d8], %r6;
        st.global.b32 [%d9], %r6;"""
    ),
    "bulk load": Body(
        f"""@%p1 st.global.b32 [%d0+1008], %r0;
        fence.proxy.async.global;
        @%p1 {INIT} [%r1+512], 1;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p1 {EXPECT} _, [%r1+512], 272;
        @%p1 {BULK} [%r1], [%d0], 256, [%r1+512];
        @%p1 {BULK} [%r1+1024], [%d0+1008], 16, [%r1+512];
        {TRY} %p3, [%r1+512], 0;
        ld.shared.b32 %r6, [%r3];
        bar.sync 1;
        st.global.b32 [%d8], %r0;
        st.global.b32 [%d9], %r6;"""
    ),
    "tile load": Body(
        f"""@%p1 st.global.b32 [%d0], %r0;
        fence.proxy.async.global;
        @%p1 {INIT} [%r1+512], 1;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        mov.b64 %d20, x_map; cvta.param.u64 %d21, %d20; mov.b32 %r20, 0;
        @%p1 {EXPECT} _, [%r1+512], 128;
        @%p1 {TILE} [%r1], [%d21, {{%r20, %r20}}], [%r1+512];
        {TRY} %p3, [%r1+512], 0;
        @%p2 ld.shared.b32 %r6, [%r3];
        bar.sync 1;
        @%p2 st.global.b32 [%d8], %r6;
        @%p2 st.global.b32 [%d9], %r6;"""
    ),
    "bulk store": Body(
        f"""st.shared.b32 [%r3], %r0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p1 {SEND} [%d1], [%r1], 256;
        @%p1 cp.async.bulk.commit_group;
        @%p1 cp.async.bulk.wait_group 0;
        bar.sync 1;
        st.shared.b32 [%r3], %r9;
        ld.global.b32 %r6, [%d9];
        st.global.b32 [%d8], %r6;"""
    ),
    "tile store": Body(
        f"""@%p2 st.shared.b32 [%r3], %r0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        mov.b64 %d20, x_map; cvta.param.u64 %d21, %d20; mov.b32 %r20, 0;
        @%p1 {SEND_TILE} [%d21, {{%r20, %r20}}], [%r1];
        @%p1 cp.async.bulk.commit_group;
        @%p1 cp.async.bulk.wait_group 0;
        bar.sync 1;
        @%p2 st.shared.b32 [%r3], %r9;
        @%p2 ld.global.b32 %r6, [%d8];
        @%p2 st.global.b32 [%d9], %r6;"""
    ),
    "bulk sum": Body(
        f"""mov.b32 %r2, 0f3F800000; st.shared.b32 [%r3], %r2;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p1 {SUM} [%d1], [%r1], 256;
        @%p1 cp.async.bulk.commit_group;
        @%p1 cp.async.bulk.wait_group.read 0;
        bar.sync 1;
        st.shared.b32 [%r3], %r0;""",
        programs=2,
    ),
    "rows": Body(  # a row of 64 numbers for each program
        """mul.wide.u32 %d10, %r9, 256; add.s64 %d8, %d8, %d10; add.s64 %d9, %d9, %d10;
        ld.global.b32 %r2, [%d8];
        ld.global.b32 %r4, [%d0+1020];
        add.s32 %r2, %r2, %r4;
        st.global.b32 [%d9], %r2;
        st.global.b32 [%d8], %r2;""",
        programs=3,
    ),
    "back and forth": Body(  # through global memory, between two warps
        """st.global.b32 [%d9], %r0;
        bar.sync 0;
        mul.wide.u32 %d10, %r0, 4; xor.b64 %d10, %d10, 128; add.s64 %d11, %d1, %d10;
        ld.global.b32 %r4, [%d11];
        st.global.b32 [%d8], %r4;
        bar.sync 1;
        st.global.b32 [%d11+512], %r4;"""
    ),
    "lanes": Body(
        """and.b32 %r20, %r0, 31; setp.lt.u32 %p4, %r20, 16;
        shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1;
        @%p4 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 65535;
        @%p4 vote.sync.any.pred %p5, %p1, 65535;
        @%p4 bar.warp.sync 65535;
        redux.sync.add.s32 %r6, %r0, -1;
        add.s32 %r6, %r6, %r4;
        st.global.b32 [%d9], %r6;"""
    ),
    "registers": Body(
        """@%p2 bra one;
        setmaxnreg.inc.sync.aligned.u32 184;
        bra two;
        one:
        setmaxnreg.dec.sync.aligned.u32 24;
        two:
        bar.sync 0;
        st.global.b32 [%d9], %r0;""",
        threads=384,
    ),
    "tensor memory": Body(  # registers to it and back, by four warps; columns of each warp's lanes
        """@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
        bar.sync 0;
        ld.shared.b32 %r2, [%r1];
        and.b32 %r20, %r0, 96; shl.b32 %r20, %r20, 16; add.s32 %r2, %r2, %r20;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r2];
        tcgen05.wait::ld.sync.aligned;
        st.global.b32 [%d9], %r6;
        bar.sync 1;
        ld.shared.b32 %r2, [%r1];
        @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;""",
        threads=128,
    ),
    "tensor core": Body(  # A [128,16] and B [8,16] of zeros in shared memory, without swizzling
        f"""@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+8192], 32;
        @%p1 {INIT} [%r1+8200], 1;
        mov.b32 %r2, 0; mad.lo.s32 %r4, %r0, 32, %r1; setp.ne.b32 %p4, %r2, 0;
        st.shared.v4.b32 [%r4], {{%r2, %r2, %r2, %r2}};
        st.shared.v4.b32 [%r4+16], {{%r2, %r2, %r2, %r2}};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        ld.shared.b32 %r5, [%r1+8192];
        add.s32 %r6, %r1, 0; shr.u32 %r6, %r6, 4; cvt.u64.u32 %d20, %r6;
        or.b64 %d20, %d20, {(8 << 16) | (16 << 32) | (1 << 46)};
        @%p1 {WIDE} [%r5], %d20, %d20, {(1 << 4) | (1 << 17) | (8 << 24)}, %p4;
        @%p1 {SIGNAL} [%r1+8200];
        {TRY} %p3, [%r1+8200], 0;
        st.shared.v4.b32 [%r4], {{%r0, %r0, %r0, %r0}};
        and.b32 %r20, %r0, 96; shl.b32 %r20, %r20, 16; add.s32 %r7, %r5, %r20;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r8}}, [%r7];
        tcgen05.wait::ld.sync.aligned;
        st.global.b32 [%d9], %r8;
        bar.sync 1;
        @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;""",
        threads=128,
    ),
    "warp group": Body(  # A [64,16] of registers, B [8,16] of zeros in shared memory
        f"""mov.b32 %r2, 0; mad.lo.s32 %r4, %r0, 16, %r1;
        st.shared.v4.b32 [%r4], {{%r2, %r2, %r2, %r2}};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        shr.u32 %r6, %r1, 4; cvt.u64.u32 %d20, %r6; or.b64 %d20, %d20, {(8 << 16) | (16 << 32)};
        mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;
        mov.b32 %r14, 0; mov.b32 %r15, 0; mov.b32 %r16, 0; mov.b32 %r17, 0;
        wgmma.fence.sync.aligned;
        {PRODUCT} {{%r10, %r11, %r12, %r13}}, {{%r14, %r15, %r16, %r17}}, %d20, 1, 1, 1, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        mov.b32 %r14, %r0;
        add.s32 %r18, %r10, %r14;
        bar.sync 1;
        st.shared.v4.b32 [%r4], {{%r0, %r0, %r0, %r0}};
        st.global.b32 [%d9], %r18;""",
        threads=128,
    ),
}

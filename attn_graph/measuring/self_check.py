"""Self-checks: a kernel that only its device can run is tried there before its first use.

Small graphs run in a process of their own (`measuring/device_test.py`), once for a device, its
driver, the libraries' versions and the kernel's variant. A kernel that hangs, or breaks its CUDA
context, harms nothing else. The results are compared with float64 by the accuracy rule, and the
outcome is stored. If the check fails the backend refuses, and the next one runs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import final
from warnings import warn_explicit

from attrs import asdict, evolve, frozen

from attn_graph.errors import Reason, SelfCheckWarning, user_frame
from attn_graph.lowering.backend import Backend, DeviceTest, Executable, RefusedError
from attn_graph.lowering.request import Request
from attn_graph.machine.cache import Cache
from attn_graph.machine.store import Store, Unfit, read_json, read_positive
from attn_graph.machine.target import Target

FORM = 2  # of stored outcomes; a new number checks all again
KIND = "check"  # the first word of a key in the store
DRIVER = Path("/proc/driver/nvidia/version")  # Linux's text on NVIDIA's driver
AGAIN = "`attn-graph cache clear` has it checked again"


@final
@frozen
class Proof:
    """The outcome of a self-check.

    failure: the fault, as a clause after "it"; "" without one. shares: for each graph the largest
    error, as a share of the rule's allowance. seconds: the check's own time.
    """

    failure: str = ""
    shares: tuple[float, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.failure:
            return f"failed: it {self.failure}"
        graphs = f"{len(self.shares)} graph{'' if len(self.shares) == 1 else 's'}"
        most = max(self.shares, default=0.0)
        return f"passed on {graphs}, errors up to {100 * most:.3g} % of what is allowed"


proofs: Cache[Proof] = Cache(1024)  # of this process, by folder of the store and key


@final
@frozen
class SelfCheck:
    """One check that a backend must pass before it runs on a device of this machine."""

    backend: str
    test: DeviceTest
    target: Target
    store: Store | None

    @cached_property
    def key(self) -> str:
        """Everything the outcome depends on, as a text."""
        graphs = "\n".join(map(str, self.test.graphs))
        text = {
            "form": FORM,
            "backend": self.backend,
            "variant": self.test.variant,
            "graphs": sha256(graphs.encode()).hexdigest(),
            "target": str(self.target),
            "driver": driver_version(),
            "libraries": self.target.libraries,
            "machine": platform.node(),
            "kernels": kernel_digest(),
        }
        return f"{KIND} {json.dumps(text, sort_keys=True)}"

    @property
    def place(self) -> tuple[object, str]:
        """The key among `proofs`."""
        return self.store.folder if self.store else None, self.key

    def recall(self) -> Proof | None:
        """The outcome, if known. Warns of a failure once in a process."""
        known = proofs.get(self.place)
        if known is None and self.store is not None:
            known = self.store.load(self.key, read_proof)
            if known is not None:
                self.remember(known)
        return known

    def prove(self) -> Proof:
        """The outcome; the check runs now if it is not known yet."""
        with proofs.turn(self.place):
            known = self.recall()
            if known is None:
                from attn_graph.measuring.device_test import try_graphs

                known = try_graphs(self.test, self.target)
                if self.store is not None:
                    self.store.put(self.key, json.dumps(asdict(known)).encode())
                self.remember(known)
        return known

    def remember(self, proof: Proof) -> None:
        """Keep the outcome in this process. Warns of failure, at the line outside this package."""
        proofs.put(self.place, proof)
        if proof.failure:
            text = f"{self.backend} is not used on {self.target}: its self-check, of the variant"
            text = f"{text} {self.test.variant!r}, failed: it {proof.failure}; {AGAIN}"
            warn_explicit(text, SelfCheckWarning, *user_frame())

    def reasons(self, proof: Proof) -> Iterator[Reason]:
        """The reason against the backend, if the check failed."""
        if proof.failure:
            limit = "runs only where its self-check passes"
            yield Reason("self_check", limit, f"on {self.target} it {proof.failure}; {AGAIN}")


def find_check(backend: Backend, request: Request) -> SelfCheck | None:
    """The check that a backend must pass before it runs a graph; None: it needs none."""
    test = backend.device_test(request.with_graph(backend.seen(request.graph)))
    store = request.options.store
    return None if test is None else SelfCheck(backend.name, test, request.target, store)


def failed_checks(backend: Backend, request: Request) -> tuple[Reason, ...]:
    """The reason against a backend whose check on this device is known to have failed."""
    check = find_check(backend, request)
    proof = check.recall() if check else None
    return tuple(check.reasons(proof)) if check and proof else ()


def lower_checked(backend: Backend, request: Request) -> Executable:
    """The lowered graph, after its kernel passed a check on the device, if the device is here.

    Raises RefusedError if the check fails.
    """
    check = find_check(backend, request)
    if check and request.target.device is not None and (against := [*check.reasons(check.prove())]):
        raise RefusedError(*against)
    executable = backend.lowered(request)
    notes = tuple(check_notes(backend, request))
    return evolve(executable, notes=(*executable.notes, *notes)) if notes else executable


def check_notes(backend: Backend, request: Request) -> Iterator[str]:
    """For `explain`: the outcome of the check, or when it will run."""
    check = find_check(backend, request)
    if check is None:
        return
    here = request.target.device is not None
    proof = check.recall() if here else None
    if proof is not None:
        yield f"self-check on this device: {proof}"
    else:
        where = "on this device" if here else "on the device itself"
        yield f"a self-check {where} comes before its first use; where it fails, the next one runs"


def read_proof(data: bytes) -> Proof:
    """The outcome in bytes stored by `prove`. Raises Unfit for anything else."""
    try:
        fields = read_json(data)
        shares = tuple(map(float, fields["shares"]))
        return Proof(str(fields["failure"]), shares, read_positive(fields["seconds"]))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Unfit(f"it holds no outcome of a check: {error}") from error


def stored_proofs(store: Store) -> Iterator[tuple[str, Proof]]:
    """Every outcome in a store, by its key."""
    for entry in store.entries():
        if entry.key is not None and entry.key.startswith(f"{KIND} "):
            proof = store.load(entry.key, read_proof)
            if proof is not None:
                yield entry.key, proof


def describe_check(rest: str) -> str:
    """A key in words, without its first part: backend, variant and device."""
    key = read_json(rest)
    return f"{key['backend']}, {key['variant']}, on {key['target']}"


def driver_version() -> str:
    """The version text of NVIDIA's driver; "" without one."""
    return DRIVER.read_text().partition("\n")[0] if DRIVER.exists() else ""


def kernel_digest() -> str:
    """A digest of the kernels' source: changed kernels are checked anew."""
    from attn_graph import kernels

    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]

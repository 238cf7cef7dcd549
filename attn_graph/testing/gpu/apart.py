"""Programs of one launch in several processes, if none can know of another.

Each process is a copy of this one (fork): its stores to tensors stay in it. It runs a share of the
programs, and hands back the bytes it stored and the places it read. If none of these are
another's, they are put into the tensors. If one has a fault, or two touch one place, nothing is
kept: the programs run again, one after another, with every check between them.
"""

from __future__ import annotations

import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from attn_graph.testing.gpu.faults import Fault, UnknownInstructionError
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.program import Launch
from attn_graph.testing.gpu.translate import steps_of

TOGETHER = ("atom.", "red.", "cp.reduce.", "call.")  # instructions that other programs may notice
ORDERS = {"acquire", "release", "relaxed", "volatile"}  # and loads and stores that order them


def run_launch(launch: Launch, memory: Memory, processes: int) -> None:
    """Run all programs. Raises Fault."""
    shares = [x.tolist() for x in np.array_split(launch.numbers(), processes) if x.size]
    # Programs run apart if no instruction of the kernel is for them to know of each other.
    opcodes = {step.opcode for step in steps_of(launch.code.kernel)}
    plain = (ORDERS.isdisjoint(x.split(".")) for x in opcodes if x.startswith(("ld.", "st.")))
    separate = all(plain) and not any(x.startswith(TOGETHER) for x in opcodes)
    if len(shares) < 2 or not separate or not run_shares(launch, memory, shares):
        launch.run(launch.numbers())


def run_shares(launch: Launch, memory: Memory, shares: list[list[int]]) -> bool:
    """Run shares of the programs in processes; False if nothing came of it."""
    context, started = get_context("fork"), list[tuple[Any, Any]]()
    with warnings.catch_warnings():  # this process has threads; its copies need none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        for share in shares:
            end, pipe = context.Pipe(duplex=False)
            child = context.Process(target=run_share, args=(launch, memory, share, pipe))
            child.start()
            pipe.close()
            started.append((end, child))
    made: list[Any] = [end.recv() for end, _ in started]  # Any: what run_share sends
    for _, child in started:
        child.join()
    if None in made:
        return False
    for parts in zip(*(each for _, each in made), strict=True):  # those of a region
        for n, (stored, _, _) in enumerate(parts):
            others = [x for other in (*parts[:n], *parts[n + 1 :]) for x in other[::2]]
            if np.isin(stored, np.concatenate(others)).any():
                return False
    for notes, each in made:
        launch.notes.update(notes)
        for region, (stored, words, _) in zip(memory.regions, each, strict=True):
            region.put(stored, words)
    return True


def run_share(launch: Launch, memory: Memory, numbers: list[int], pipe: Connection) -> None:
    """Run programs, and send the notes and the places touched in each region; None for a fault."""
    try:
        launch.run(numbers)
    except (Fault, UnknownInstructionError):
        pipe.send(None)
    else:
        pipe.send((launch.notes, [region.touched() for region in memory.regions]))

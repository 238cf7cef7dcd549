"""`make gpu` is right the first time: rehearsed with items that fail, and on a played GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.measuring.self_check import Proof
from benchmarks.gpu import cases, checks, frontend, results, session, tables, tools, wheels
from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.page import NEVER
from benchmarks.gpu.results import Outcome, Results, Row
from benchmarks.gpu.session import INTERRUPTED, ITEMS, Item
from tests.support import played_gpu
from tests.support.gpu_items import ROW, arguments, make_item
from tests.support.processes import is_running
from tests.support.sources import ROOT, what_make_runs

MINUTES = 25  # that all items may take on an H200, by their own estimates
TABLES = [x.name for x in ITEMS if x.function.partition(":")[0] == "benchmarks.gpu.tables"]
ALL_CASES = [
    *cases.wide_cases(), *cases.narrow_cases(), *cases.tutorial_cases(), *cases.grouped_cases(),
    *cases.decode_cases(), *cases.window_cases(), *cases.soft_cap_cases(), *cases.flex_cases(),
    *cases.tile_cases(), *cases.raw_cases(), *cases.stream_cases(),
]  # fmt: skip


@pytest.fixture(autouse=True)
def a_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It says that it has an H200; signals are as before in the end."""
    monkeypatch.setattr(session, "MACHINE", make_item("describe"))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def read_figures(out: Path) -> Any:  # Any: JSON
    (path,) = out.glob("*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_all_together_fit_into_the_time_that_a_gpu_is_lent_for() -> None:
    assert sum(item.estimate for item in ITEMS) < 60 * MINUTES
    assert all(item.limit > item.estimate for item in ITEMS)
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    functions = [session.MACHINE, *ITEMS]
    assert all(callable(find(item.function)) for item in functions)


def find(function: str) -> Any:  # Any: whatever the module has
    from benchmarks.gpu.child import find_function

    return find_function(function)


def test_what_goes_wrong_costs_one_item_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash, an exception, a hang with a process of its own, garbage, and nothing at all."""
    monkeypatch.setenv("REHEARSED_CHILD", str(tmp_path / "child"))
    names = ("crash", "refuse", "babble", "give_nothing", "succeed")
    items = [*map(make_item, names[:2]), make_item("hang", 4), *map(make_item, names[2:])]
    assert session.run_session(arguments(tmp_path), items) == 1
    outcomes = read_figures(tmp_path)["items"]
    assert {name: x["state"] for name, x in outcomes.items()} == {
        "crash": "failed",
        "refuse": "failed",
        "hang": "timed out",
        "babble": "failed",
        "give_nothing": "failed",
        "succeed": "done",
    }
    assert [len(x["rows"]) for x in outcomes.values()] == [1, 0, 1, 1, 0, 1]
    assert "signal 11" in outcomes["crash"]["error"]
    assert "illegal memory access" in outcomes["crash"]["error"]
    assert "no such kernel" in outcomes["refuse"]["error"]
    assert "ended after 4 s" in outcomes["hang"]["error"]
    assert "4 lines are not rows" in outcomes["babble"]["error"]
    assert "it gave no row" in outcomes["give_nothing"]["error"]
    wait_for(lambda: not is_running(int((tmp_path / "child").read_text())))
    page = capsys.readouterr().out
    assert "about 0 minutes on an H200" in page
    assert "2.00, the geometric mean of 4 rows" in page
    assert page.rstrip().endswith(".json")
    (saved,) = tmp_path.glob("*.md")
    assert saved.read_text(encoding="utf-8") in page


def test_what_is_not_done_comes_next_time_and_what_never_ran_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [make_item("refuse"), make_item("succeed")]
    assert session.run_session(arguments(tmp_path, "refuse"), items) == 1
    assert NEVER in capsys.readouterr().out
    assert session.run_session(arguments(tmp_path), items) == 1
    ran = capsys.readouterr().out
    assert ran.index("succeed: done") < ran.index("refuse: failed")
    assert [*read_figures(tmp_path)["items"]] == ["refuse", "succeed"]
    assert session.run_session(arguments(tmp_path), items[1:]) == 0
    assert "succeed: about" not in capsys.readouterr().out  # it is done
    assert session.run_session(arguments(tmp_path, restart=True), items[1:]) == 0
    assert [*read_figures(tmp_path)["items"]] == ["succeed"]


def test_an_item_that_would_not_end_in_time_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [Item("long", "tests.support.gpu_items:succeed", 90, 100), make_item("succeed")]
    assert session.run_session(arguments(tmp_path, minutes=1), items) == 1
    assert "long: left for another run" in capsys.readouterr().out
    assert [*read_figures(tmp_path)["items"]] == ["succeed"]


def test_figures_of_other_versions_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [make_item("succeed")]
    session.run_session(arguments(tmp_path), items)
    monkeypatch.setenv("REHEARSED_TORCH", "2.15.0+cu132")
    with pytest.raises(SystemExit, match=r"is of another run: --restart(.|\n)*2\.11(.|\n)*2\.15"):
        session.run_session(arguments(tmp_path), items)


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MACHINE", make_item("refuse"))
    with pytest.raises(SystemExit, match=r"no GPU to measure on: exit code 1(.|\n)*no such kernel"):
        session.run_session(arguments(tmp_path), [])


def test_an_unknown_item_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no item is called 'flux'; there are doctor, "):
        session.run_session(arguments(tmp_path, "flux"))


PROGRAM = """
import sys
from pathlib import Path
from tests.support.gpu_items import arguments, make_item
from benchmarks.gpu import session
session.MACHINE = make_item("describe")
items = [*map(make_item, ("succeed", "hang", "refuse"))]
sys.exit(session.run_session(arguments(Path(sys.argv[1])), items))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_interruption_keeps_the_rows_of_its_item_and_the_same_command_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A signal while an item runs: its process ends too, what it has measured is there."""
    out, child = tmp_path / "out", tmp_path / "child"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"REHEARSED_CHILD": str(child), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    wait_for(lambda: child.exists() and child.read_text() != "")
    process.send_signal(number)
    page, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "interrupted: the same command goes on from here" in page
    done, cut = read_figures(out)["items"].values()
    assert (done["state"], cut["state"]) == ("done", "interrupted")
    assert cut["rows"] == [ROW]
    assert cut["error"].startswith("interrupted after ")
    wait_for(lambda: not is_running(int(child.read_text())))  # its new parent has to reap it
    items = [make_item("refuse"), make_item("succeed"), evolve(make_item("refuse"), name="hang")]
    session.run_session(arguments(out), items)
    after = read_figures(out)["items"]
    assert {name: x["state"] for name, x in after.items()} == {
        "succeed": "done",
        "hang": "failed",
        "refuse": "failed",
    }
    assert after["hang"]["rows"] == [ROW]  # it gave none the second time


def test_what_is_interrupted_comes_before_what_failed(tmp_path: Path) -> None:
    items = [*map(make_item, ("refuse", "hang", "succeed"))]
    outcomes = {"refuse": Outcome("failed", 1.0), "hang": Outcome("interrupted", 1.0)}
    due = session.select_due(items, Results({}, outcomes))
    assert [item.name for item in due] == ["hang", "succeed", "refuse"]


def test_an_item_without_a_package_that_it_uses_is_not_done(tmp_path: Path) -> None:
    items = [evolve(make_item("succeed"), uses=("pytest", "no-such-package"))]
    assert session.run_session(arguments(tmp_path), items) == 1
    outcome = read_figures(tmp_path)["items"]["succeed"]
    assert outcome["state"] == "failed"
    assert outcome["rows"] == [ROW]
    assert outcome["error"].startswith("without no-such-package: not installed")
    assert session.run_session(arguments(tmp_path), [make_item("succeed")]) == 0


def test_make_passes_on_what_the_command_takes() -> None:
    given = ("MINUTES=9", "WHEELS=wheels", "OUT=there", "PYTHON=python3")
    assert what_make_runs("gpu", *given).split() == [
        "python3",
        "-m",
        "benchmarks.gpu",
        "--wheels",
        "wheels",
        "--out",
        "there",
        "--minutes",
        "9",
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is so. Fails where it does not come about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    whole = Results({"gpu": "h200"}).add("a", Outcome("done", 1.5, rows=(ROW,)))
    whole.save(path)
    broken = whole.add("b", Outcome("done", 1.0, rows=({"ms": float("nan")},)))
    with pytest.raises(ValueError, match="JSON"):
        broken.save(path)
    assert Results.load(path) == whole


def test_sources_have_one_digest_with_and_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    here = results.describe_sources(None)
    monkeypatch.setattr(results, "which", lambda program: None)
    there = results.describe_sources(None)
    assert there["sources"] == here["sources"]
    assert there["commit"] == "unknown"
    assert results.describe_driver() == "unknown"


# Wheels


def make_wheel(folder: Path, name: str) -> None:
    """A wheel of one module that holds nothing."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_wheels_are_installed_beside_torch_which_stays(tmp_path: Path) -> None:
    for name in ("attrs", "markdown_it_py", "torch"):
        make_wheel(tmp_path, name)
    wheels.install(tmp_path, into := tmp_path / "into")
    assert sorted(path.name for path in into.glob("*.py")) == ["attrs.py", "markdown_it_py.py"]


def test_a_folder_without_any_of_them_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no wheel of attrs, "):
        wheels.install(tmp_path, tmp_path / "into")


def test_what_is_missing_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "PACKAGES", tmp_path / "none")
    monkeypatch.setattr(wheels, "is_installed", lambda name: name not in ("attrs", "execnet"))
    with pytest.raises(SystemExit, match=r"^not installed: attrs\n(.|\n)*pip download"):
        wheels.prepare(None)
    assert "execnet is not installed: tests run one after another" in capsys.readouterr().out


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "version", lambda name: "2.10.1+cu128")
    with pytest.raises(SystemExit, match=r"needs torch 2\.11 or later, .* has 2\.10\.1\+cu128"):
        wheels.check_torch()


def test_the_command_itself_needs_nothing_but_python(tmp_path: Path) -> None:
    """Before wheels are installed: `-S` has no packages, and a copy no `.gpu` of an earlier run."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    program = (sys.executable, "-S", "-m", "benchmarks.gpu")
    process = subprocess.run(
        program, cwd=tmp_path, capture_output=True, text=True, check=False, env={}
    )
    assert process.returncode == 1
    assert process.stderr.startswith("not installed: attrs, click, hypothesis")


def test_needs_are_fixed_by_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    needs = {*wheels.list_needs()}
    assert needs <= {line.partition("==")[0] for line in lines}
    assert wheels.OPTIONAL.keys() < needs


def test_the_page_for_contributors_downloads_what_the_hint_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert " ".join(wheels.DOWNLOAD) in re.sub(r"\s*\\\n\s*", " ", page)


# Items


def test_the_first_try_says_which_backend_fails_and_how(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.try_first(played_gpu.Played(), rows.append)
    assert [(row["backend"], row["pass"]) for row in rows] == [
        *(("triton", "forward"), ("triton", "backward")),
        *(("cudnn", "forward"), ("cudnn", "backward")),
        *(("fa4", "forward"), ("fa4", "backward")),
    ]
    assert all(row["outcome"].startswith("ok: ") for row in rows)

    def refuse(self: object, graph: ag.Graph, backend: str) -> ag.Plan:
        raise ag.NoBackendError(graph, ())

    monkeypatch.setattr(played_gpu.Played, "compile", refuse)
    with pytest.raises(
        SystemExit, match=r"triton, forward: no backend(.|\n)*cudnn, backward: no b"
    ):
        checks.try_first(played_gpu.Played(), rows.append)


def test_self_checks_that_fail_are_told_from_a_package_that_is_not_there(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.prove_kernels(played_gpu.Played(), rows.append)
    assert len(rows) == 2 * len([*cases.checked_cases()])
    assert all(row["outcome"].startswith("passed on 1 graph") for row in rows)
    rows.clear()
    bare = Gpu(torch.device("cpu"), evolve(ag.Target.of("h200"), libraries=()))
    checks.prove_kernels(bare, rows.append)
    assert all("needs flash-attn-4, which is not installed" in row["outcome"] for row in rows)
    wrong = Proof("is wrong: an error is 3 times what the accuracy rule allows")
    monkeypatch.setattr(played_gpu.Played, "check", lambda *_: ("played", wrong))
    with pytest.raises(SystemExit, match=r"full .*, backward: failed: it is wrong"):
        checks.prove_kernels(played_gpu.Played(), rows.append)


@pytest.mark.parametrize(("code", "fails"), [(0, False), (tools.FAULTY, True)])
def test_what_a_sanitizer_finds_fails_its_item(
    code: int, fails: bool, rows: list[Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program of that name, which runs nothing, prints a summary and ends with a code."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho summary of $2\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SystemExit, match="memcheck and racecheck") if fails else nullcontext():
        tools.sanitize(played_gpu.Played(), rows.append)
    assert [row["report"] for row in rows] == ["summary of memcheck", "summary of racecheck"]
    assert [row["exit code"] for row in rows] == [code, code]


def test_programs_that_are_not_installed_are_named(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "which", lambda name: None)
    tools.profile(played_gpu.Played(), rows.append)
    assert rows == [{"program": "ncu", "outcome": "not installed"}]


def test_one_forward_and_backward_are_what_such_programs_look_at(rows: list[Row]) -> None:
    tools.attend_once(played_gpu.Played(), rows.append)
    tools.train_once(played_gpu.Played(), rows.append)
    assert [row["pass"] for row in rows] == ["forward", "forward and backward"]


def test_every_case_is_planned_for_an_h200() -> None:
    """By a forward, and by dq, dk and dv where it is trained."""
    for case in dict.fromkeys(ALL_CASES):
        forward, *backward = played_gpu.plan_whole(case)
        assert kernels_of(forward)[-1] in ("forward", "merge_parts")
        assert len(backward) == case.backward
        for launches in backward:
            assert {"delta", "query_gradient", "key_gradient"} <= {*kernels_of(launches)}


def kernels_of(launches: Sequence[str]) -> list[str]:
    """The names of the kernels in lines such as "forward: 512 programs, ..."."""
    return [line.partition(":")[0] for line in launches]


@pytest.fixture
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", TABLES)
def test_tables_on_a_played_gpu(name: str, rows: list[Row]) -> None:
    """Each way agrees with the first; what has no rows has a refusal."""
    (item,) = (item for item in ITEMS if item.name == name)
    find(item.function)(played_gpu.Played(), rows.append)
    assert rows
    assert all(row.get("apart", 0) < 0.02 for row in rows)
    assert all(row["ms"] > 0 < row["predicted ms"] for row in rows if "refused" not in row)


def test_graphs_on_two_streams_of_a_played_gpu(rows: list[Row]) -> None:
    from benchmarks.gpu.calls import measure_streams

    device = played_gpu.Played()
    measure_streams(device, rows.append)
    assert {*device.replays} == {2}
    assert all(row["apart"] == 0 for row in rows)


@pytest.mark.parametrize("causal", [False, True])
def test_the_frontend_alone_gets_the_pointers_of_a_plan(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, with a frontend that only remembers."""
    seen: list[Any] = []
    stand_in = SimpleNamespace(
        get_workspace_size=lambda: 8, execute=lambda *call, handle: seen.append((call, handle))
    )
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(set_stream=lambda **_: None))
    monkeypatch.setattr(frontend, "handle", lambda device: "handle")
    monkeypatch.setattr(frontend, "build_graph", lambda plain, handle: stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    graph = simplify(Case((1, 2, 64, 64), dtype=torch.float16, causal=causal).graph())
    backward = training_gradient(graph, None)
    assert backward is not None
    more = (x, torch.zeros(1, 2, 64), x)
    for one, tensors in ((graph, (x, x, x)), (backward, (x, x, x, *more))):
        frontend.frontend_call(one, ag.Target.of("h200"), tensors)()
        (pack, _), handle = seen.pop()
        assert handle == "handle"
        assert {t.data_ptr() for t in tensors} <= {t.data_ptr() for t in pack.values()}


def test_a_row_is_rated_by_what_the_mask_keeps() -> None:
    case = Case((1, 1, 4096, 128), causal=True)
    row = tables.rate(played_gpu.Played(), case, "forward", "ours", 1.0)
    assert row["TFLOP/s"] == round(4 * 128 * 4096 * 4097 / 2 / 1e9, 2)
    assert row["goal"] == cases.GOALS["causal", "forward"]


def test_a_fault_of_the_device_is_no_refusal() -> None:
    case = Case((1, 1, 16, 16))
    assert "no kernel" in tables.refuse(case, "SDPA", RuntimeError("no kernel"))["refused"]
    with pytest.raises(torch.AcceleratorError):
        tables.refuse(case, "SDPA", torch.AcceleratorError("an illegal memory access"))


def test_the_median_of_events_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a played runtime whose clock goes on with each call."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def call(step: float) -> None:
        clock[0] += step

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("benchmarks.gpu.device.COLD_BYTES", 8)
    device = Gpu(torch.device("cpu"), ag.Target.of("h200"))
    times = device.milliseconds({"a": lambda: call(2.0), "b": lambda: call(3.0)}, 5)
    assert times == {"a": 2.0, "b": 3.0}
    assert device.host_microseconds(lambda: None) > 0


def test_reports_of_tests_are_rows(rows: list[Row]) -> None:
    report = SimpleNamespace(
        when="call", outcome="failed", nodeid="a::b", duration=1.234, longreprtext="1\n2\n3\n4"
    )
    plugin: Any = checks.Reports(rows.append)
    plugin.pytest_runtest_logreport(report)
    plugin.pytest_runtest_logreport(SimpleNamespace(when="setup", outcome="passed"))
    plugin.pytest_warning_recorded(SimpleNamespace(message=UserWarning("old")), "a::c")
    assert rows.pop() == {"test": "a::c", "warning": "old"}
    assert rows == [{"test": "a::b", "outcome": "failed", "s": 1.23, "text": "2\n3\n4"}]


def test_every_test_of_a_gpu_is_in_one_item(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []
    monkeypatch.setattr(checks, "run_tests", lambda _, paths, **more: files.extend(paths))
    for item in ITEMS:
        if item.name.startswith("tests: "):
            find(item.function)(None, None)
    assert sorted(files) == sorted(x for x in (ROOT / "tests").rglob("test_*.py") if has_mark(x))


def has_mark(path: Path) -> bool:
    """Whether a test of a file needs a GPU."""
    return "mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)


@pytest.mark.slow
def test_the_whole_command_on_a_played_gpu(tmp_path: Path) -> None:
    """Items in processes of their own, those that run tests too: these skip, and so say nothing.
    Of the tables, which all run above, one."""
    names = [item.name for item in ITEMS if item.name not in TABLES[1:]]
    options = (
        "--device",
        "tests.support.played_gpu:Played",
        "--out",
        str(tmp_path),
        "--commit",
        "abc",
    )
    program = sys.executable, "-m", "benchmarks.gpu", *names, *options
    process = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    figures = read_figures(tmp_path)
    states = {name: x["state"] for name, x in figures["items"].items()}
    missing = {item.name for item in ITEMS if item.lacks}
    assert states == {x: "failed" if x in missing else "done" for x in names}, process.stdout
    assert process.returncode == 1  # some are left
    assert figures["machine"]["gpu"] == "h200"
    assert figures["machine"]["commit"] == "abc"

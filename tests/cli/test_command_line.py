"""The command line says what the library says, and exits with what it documents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch

import attn_graph as ag
from attn_graph.cli.main import commands, main, stranger_flag
from tests.support.command_line import run
from tests.support.sources import ROOT

GRAPH = ag.attention(*(ag.TensorSpec((1, 2, 64, 16), torch.float32),) * 3, mask=ag.Causal())
SMALL = ("--q", "1,2,64,16", "--seconds", "0", "--backends", "math,torch_sdpa")


def every(name: str, command: click.Command) -> list[tuple[str, click.Command]]:
    inner = command.commands.items() if isinstance(command, click.Group) else ()
    return [(name, command), *(x for part, each in inner for x in every(f"{name} {part}", each))]


@pytest.mark.parametrize("name", [name for name, _ in every("", commands)])
def test_every_help_has_an_example_that_is_a_command(name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert f"Example:\n    attn-graph{name}" in result.output


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--caual", "did you mean --causal?"),
        ("--varlen", "write --packed B"),
        ("--block-table", "write --pages COUNT"),
        ("--fp8", "write --dtype or --kv-dtype"),
        ("--softmax-scale", "write --scale"),
        ("--zebra", "no such option: --zebra"),
        ("--values", "no such option: --values"),
    ],
)
def test_a_wrong_flag_is_told_the_near_one_or_none(flag: str, told: str) -> None:
    context = click.Context(commands.commands["explain"])
    text = stranger_flag(click.NoSuchOption(flag, ctx=context))
    assert text.partition("; ")[2 if ";" in text else 0].startswith(told)


def test_the_entry_point_is_what_the_module_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, name = project["scripts"]["attn-graph"].split(":")
    assert callable(getattr(import_module(module), name))


def process(*line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attn_graph", *line],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_wrong_usage_of_the_program_shows_no_traceback() -> None:
    done = process("explain", "--q", "1,2,8,8", "--target", "h9", FORCE_COLOR="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: target 'h9' is not known; known are cpu, cuda, a100" in done.stderr
    assert "Traceback" not in done.stderr


EXPLAINED = ("explain", "--q", "1,2,64,16", "--causal", "--target", "cpu")


@pytest.mark.parametrize("colour", [True, False])
def test_the_module_runs_as_a_program_in_colours_for_those_who_want_them(colour: bool) -> None:
    asked = {"FORCE_COLOR": "1"} if colour else {"FORCE_COLOR": "", "NO_COLOR": "1"}
    done = process(*EXPLAINED, TERM="xterm", **asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("\x1b[" in done.stdout) == colour
    assert colour or done.stdout == f"{ag.explain(GRAPH, target='cpu')}\n"


def test_explain_prints_what_the_library_explains() -> None:
    assert run(*EXPLAINED).output == f"{ag.explain(GRAPH, target='cpu')}\n"
    assert json.loads(run(*EXPLAINED, "--json").output) == [
        json.loads(json.dumps(ag.explain(GRAPH, target="cpu").to_dict()))
    ]


def test_a_graph_may_come_as_text(tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text(str(GRAPH))
    due = run(*EXPLAINED).output
    assert run("explain", str(path), "--target", "cpu").output == due
    assert run("explain", "-", "--target", "cpu", stdin=str(GRAPH)).output == due


def test_what_explain_printed_is_a_graph_to_explain() -> None:
    printed = run(*EXPLAINED, "--target", "h200").output
    assert run("explain", "-", "--target", "cpu", stdin=printed).output == run(*EXPLAINED).output
    coloured = printed.replace("def", "\x1b[1mdef\x1b[0m")
    assert run("explain", "-", "--target", "cpu", stdin=coloured).output == run(*EXPLAINED).output


def test_targets_come_one_after_another() -> None:
    told = run(*EXPLAINED, "--target", "h200").output
    assert told.index("runs this on cpu: ") < told.index("runs this on h200 (cuda sm_90): ")


FLAGS = {
    "--layout bshd --dtype bf16": "q: bf16[2, 4, 8, 16](strides=(512, 16, 64, 1))",
    "--k 2,2,8,16 --v 2,2,8,32": "v: f32[2, 2, 8, 32]",
    "--causal --window 5,2 --prefix 3": "mask=((Causal() & Window(left=5, right=2)) | Prefix(",
    "--prefix 3": "mask=Prefix(length=3)",
    "--mask ~Prefix(3) --causal": "mask=(Causal() & ~Prefix(length=3))",
    "--k 2,4,9,16 --causal --align bottom_right": "mask=Causal(align='bottom_right')",
    "--lengths": "kv_lengths: i32[2]",
    "--q-lengths": "q_lengths: i32[2]",
    "--segments": "kv_segments: i32[2, 8]",
    "--mask Keep()": "keep: bool[2, 4, 8, 8]",
    "--soft-cap 30": "soft_cap(s, cap=30.0)",
    "--alibi": "alibi(s",
    "--bias 1,4,8,8": "bias: f32[1, 4, 8, 8]",
    "--dtype f16 --bias 1,4,8,1:f32": "bias: f32[1, 4, 8, 1]",
    "--sinks": "sinks: f32[4]",
    "--dropout 0.1": "dropout(p, seed, offset, rate=0.1)",
    "--stats": "return o, lse",
    "--scale 0.5": "scores(q, k, scale=0.5)",
    "--dtype float16": "q: f16[2, 4, 8, 16]",
    "--dtype fp16 --bias 1,4,8,1:float32": "bias: f32[1, 4, 8, 1]",
    "--dtype bfloat16": "q: bf16[2, 4, 8, 16]",
    "--packed 3 --q 20,4,16": "q_starts: i32[4]",
    "--packed 3 --q 20,4,16 --k 30,4,16": "kv_starts: i32[4]",
    "--packed 3 --q 20,4,16 --all-rows": "lengths(q_starts, all_rows=True)",
    "--packed 3 --q 20,4,16 --max-lengths 9,7 --mask Keep()": "keep: bool[3, 4, 9, 7]",
    "--k 5,3,4,16 --pages 6 --lengths": "pages: i32[2, 6]",
    "--k 5,3,4,16 --pages 6 --mask Keep()": "keep: bool[2, 4, 8, 18]",
    "--packed 3 --q 20,4,16 --k 5,3,4,16 --pages 6 --lengths": "kv_lengths: i32[3]",
    "--k 5,3,4,16 --pages 6 --finite-pages": "finite=True",
    "--kv-dtype i8": "k: i8[2, 4, 8, 16]",
    "--kv-dtype float8_e4m3fn": "v_scale: f32[1, 1, 1, 1]",
    "--dtype i8 --sinks": "q_scale: f32[1, 1, 1, 1]",
    "--dtype i8 --o-scale": "return o2, amax",
    "--blocks 4x2": "keep_blocks: bool[2, 4, 2, 4]",
}


@pytest.mark.parametrize("said", FLAGS)
def test_each_flag_says_its_part_of_the_graph(said: str) -> None:
    result = run(
        "bench", "--q", "2,4,8,16", *said.split(), "--seconds", "0", "--backends", "math", "--json"
    )
    assert result.exit_code == 0
    told = json.loads(result.output)
    assert FLAGS[said] in told["graph"]
    passes = ["forward"] if "--o-scale" in said else ["forward", "backward"]
    assert [x["pass"] for x in told["results"]] == passes


def test_a_graph_may_be_like_another_s_text(tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text(
        run("explain", "--q", "2,4,8,16", "--k", "2,2,9,16", "--layout", "bshd").output
    )
    result = run("explain", "--like", str(known), "--dtype", "bf16", "--soft-cap", "3")
    assert "q: bf16[2, 4, 8, 16](strides=(512, 16, 64, 1))" in result.output
    assert "k: bf16[2, 2, 9, 16](strides=" in result.output
    longer = run("explain", "--like", str(known), "--k", "2,2,99,16", "--v", "2,2,99,16")
    assert "k: f32[2, 2, 99, 16]," in longer.output
    known.write_text(
        known.read_text().replace("q: f32", "query: f32").replace("(q, k", "(query, k")
    )
    refused = run("explain", "--like", str(known))
    assert refused.exit_code == 2
    assert "has no input named q" in refused.output


WRONG = {
    "explain": "describe a graph: --q and further flags, or FILE",
    "explain --q 1,2": "1,2 has 2 sizes, and [batch, heads, positions, head size] has 4 or 3",
    "explain --q 1,2,8": "--q has 3 sizes, and needs 4; --packed B has sequences in a row",
    "explain --q 1,2,8,8 --packed 2": "--q has 4 sizes, and needs 3",
    "explain --q 1,2,8,8 --pages 2": "--pages needs the pool: --k PAGES,ROWS,G,D",
    "explain --q 1,2,8,8 --o-scale": "o_scale is given, and q_scale is not",
    "explain --q 1,2,8,8 --kv-dtype f16": "'f16' is none of f8e4m3, f8e5m2, i8",
    "explain --q 1,a,2,3": "'1,a,2,3' is not a list of sizes",
    "explain --q 1,3,8,8 --k 1,2,8,8": "k and v have 2 heads (axis 1), not a divisor of",
    "explain --q 1,2,8,8 --k 1,2,9,8 --causal": "pass --align top_left (i sees",
    "explain --q 20,4,16 --packed 3 --k 9,8,4,16 --pages 6 --causal": (
        "pass --align top_left or --align bottom_right"
    ),
    "explain --q 1,2,8,8 --finite-pages": "finite_pages=True speaks of pools",
    "explain --q 1,2,8,8 --all-rows": "all_rows=True speaks of packed rows",
    "explain --q 1,2,8,8 --target tpu": "target 'tpu' is not known",
    "explain --q 1,2,8,8 --backends nobody": "no backend is named 'nobody'",
    "explain --q 1,2,8,8 --max-workspace 1XB": "size '1XB' is not a number",
    "explain --q 1,2,8,8 --window 1,2,3": "1,2,3 has 3 sizes, and a window has 1 or 2",
    "explain --q 1,2,8,8 --window 1 --mask Foo()": "Foo() is not a known value",
    "explain --q 1,2,8,8 --bias 1,2,8,8:int": "'int' is none of f16, bf16, f32, f64",
    "explain --q 1,2,8,8 --layout bhs": "layout 'bhs'",
    "explain --q 1,2,8,8 -": "FILE says the graph, and --q would say another",
    "explain -": "line 1: expected one `def graph(...)`",
    "mask 4": "Missing argument 'N'",
    "mask 4 4 Causal(": "line 1: '(' was never closed",
    "mask 4 4 --block 3x3x3": "3x3x3 has 3 sizes, and a tile has 1 or 2",
    "mask 4 4 causal": "causal is not a known value; a mask is made of Causal(align), Window(left",
    "explain --q 1,2,8,8 --dtype f8": "'f8' is none of f16, bf16, f32, f64, f8e4m3, f8e5m2, i8",
    "cache verify --folder nowhere": "Directory 'nowhere' does not exist",
    "cache list --folder nowhere": "Directory 'nowhere' does not exist",
    "mask 4 4 --block 0x3": "block 0 is not a whole number of at least 1",
    "mask 4 4 -o mask.txt": "mask.txt ends in none of .png, .svg, .pdf",
    "mask 4 4 -o nowhere/mask.png": "the folder nowhere does not exist",
    "bench --q 1,2,8,8 --cpu -o x.svg --plot roofline": "the rates of cpu are not known",
    "cache": "Usage: attn-graph cache",
    "nothing": "No such command 'nothing'",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_told_in_the_errors_own_words(line: str) -> None:
    result = run(*line.split(), stdin="x = 1")
    assert result.exit_code == 2
    assert WRONG[line] in result.output
    assert "(at " not in result.output, "the line of a program means nothing here"


def test_no_is_an_exit_code() -> None:
    refused = run("explain", "--q", "1,2,8,8", "--target", "h200", "--backends", "torch_sdpa")
    assert refused.exit_code == 1
    assert "no backend can run this on " in refused.output
    assert run("bench", "--q", "1,2,8,8", "--cpu", "--backends", "cudnn").exit_code == 1


def test_a_refusal_of_the_one_backend_that_may_run_tells_of_no_memory() -> None:
    line = ("explain", "--q", "1,2,8,8", "--target", "h200", "--backends", "torch_sdpa")
    assert "workspace" not in run(*line).output
    assert json.loads(run(*line, "--json").output)[0]["memory"] is None


def test_sizes_may_be_thousands_of_bytes() -> None:
    line = ("explain", "--q", "1,8,512,64", "--dtype", "f16", "--target", "cpu", "--max-workspace")
    assert "max_workspace is 2,000 bytes" in run(*line, "2KB").output
    assert "max_workspace is 2,048 bytes" in run(*line, "2KiB").output


def test_a_null_byte_is_wrong_usage_wherever_it_stands() -> None:
    for line in (
        ("explain", "--q", "1,2,8,8", "--target", "cpu\0"),
        ("explain", "graph\0.txt"),
        ("mask", "4", "4", "Causal()\0"),
        ("mask", "4", "4", "-o", "a\0/b.png"),
        ("cache", "list", "--folder", "a\0b"),
        ("\0",),
    ):
        result = run(*line)
        assert result.exit_code == 2
        assert "holds a null byte" in result.output


def test_every_command_has_json() -> None:
    for name, command in every("", commands):
        if not isinstance(command, click.Group):
            assert "--json" in run(*name.split(), "--help").output, name


def test_a_mask_is_told_to_programs() -> None:
    told = json.loads(run("mask", "256", "256", "Causal()", "--block", "64", "--json").output)
    assert told == {
        "mask": "Causal()",
        "queries": 256,
        "keys": 256,
        "tiles": {
            "block": [64, 64], "empty": 6, "mixed": 4, "full": 6, "exact": True,
            "estimated": False, "total": 16,
        },
        "computed": 0.625,
    }  # fmt: skip
    assert json.loads(run("mask", "9", "9", "--json").output)["mask"] is None


def test_one_number_is_a_square_tile() -> None:
    both = [run("mask", "64", "64", "--causal", "--block", size).output for size in ("16", "16x16")]
    assert both[0] == both[1]


def test_a_mask_is_shown_and_its_tiles_counted() -> None:
    written = run("mask", "256", "256", "Causal() & (Window(64) | Prefix(4))", "--block", "64x64")
    assert written.output == (
        "▒···\n▒▒··\n▒▒▒·\n▒·▒▒\n"
        "256 queries down, 256 keys across, a mark a tile of 64 x 64: █ kept, ▒ some, · none\n"
        "(Causal() & (Window(left=64) | Prefix(length=4))): 16 tiles of 64 x 64: 7 empty, 9 mixed, "
        "0 full; 56.2 % to compute\n"
    )
    flags = run("mask", "256", "256", "--causal", "--lengths", "--segments").output
    assert "4 tiles of 128 x 128: 1 empty, 3 mixed, 0 full, before the data are known" in flags
    assert "no mask: 1 tile of 128 x 128: 0 empty, 0 mixed, 1 full" in run("mask", "9", "9").output


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pictures_are_drawn_to_files(tmp_path: Path, name: str, start: bytes) -> None:
    for n, line in enumerate(
        (
            ("mask", "512", "512", "--causal"),
            ("bench", *SMALL, "--cpu", "--plot", "bars"),
            ("bench", *SMALL, "--cpu", "--peak", "1e12", "--bandwidth", "1e11"),
        )
    ):
        path = tmp_path / f"{n}{name}"
        result = run(*line, "-o", str(path))
        assert result.exit_code == 0
        assert f"written to {path}" in result.stderr
        assert path.read_bytes().startswith(start)


def test_without_matplotlib_the_answer_is_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run("mask", "4", "4", "-o", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "pip install 'attn-graph[plot]'" in result.stderr


def test_bench_times_what_takes_the_graph_and_tells_why_the_rest_does_not() -> None:
    result = run(
        "bench", *SMALL, "--cpu", "--soft-cap", "20", "--peak", "1e12", "--bandwidth", "1e11"
    )
    assert result.exit_code == 0
    for part in ("math", "forward", "backward", "flop/s", "%"):
        assert part in result.output
    assert "torch_sdpa can't: does not support SoftCap" in result.output


def test_bench_names_backends_without_their_device_on_one_line() -> None:
    result = run("bench", "--q", "1,2,64,16", "--seconds", "0", "--cpu", "--dtype", "bf16")
    assert "cudnn, fa4, torch_flash, torch_efficient, torch_cudnn can't: needs an" in result.output


def test_bench_times_the_gradient_of_o_where_lse_is_handed_out() -> None:
    """A backend without a gradient of lse has a backward to measure then."""
    line = ("bench", *SMALL[:-1], "torch_sdpa", "--cpu", "--json")
    runs = [json.loads(run(*line, *more).output)["results"] for more in ((), ("--stats",))]
    passes = [[(x["backend"], x["pass"]) for x in results] for results in runs]
    assert passes[0] == passes[1] == [("torch_sdpa", "forward"), ("torch_sdpa", "backward")]
    assert [x["bytes"] for x in runs[0]][1] == [x["bytes"] for x in runs[1]][1]


def test_bench_counts_what_the_mask_leaves() -> None:
    line = ("bench", *SMALL, "--cpu", "--forward-only", "--json")
    (whole, *_), (some,) = (
        json.loads(run(*line, *more).output)["results"] for more in ((), ("--mask", "Keep()"))
    )
    assert some["pass"] == "forward"
    assert 0.4 * whole["flops"] < some["flops"] < 0.6 * whole["flops"]
    assert whole["achieved"] is None


def interrupting(after: int) -> Callable[..., float]:
    """Times a job in no time, until Ctrl-C."""
    times = iter([*range(1, after + 1)])

    def sample(*job: object) -> float:
        seconds = next(times, None)
        if seconds is None:
            raise KeyboardInterrupt
        return float(seconds)

    return sample


@pytest.mark.parametrize(
    ("after", "passes"), [(3, ["forward"]), (4, ["forward", "backward"]), (1, [])]
)
def test_an_interrupt_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, after: int, passes: list[str]
) -> None:
    """Two jobs are warmed up, each timed once, then they take turns."""
    line = ("bench", "--q", "1,2,64,16", "--cpu", "--backends", "math")
    monkeypatch.setattr("attn_graph.measuring.timing.sample", interrupting(after))
    result = run(*line, "--json")
    assert result.exit_code == 130
    told = json.loads(result.output)
    assert told["interrupted"] is True
    assert [x["pass"] for x in told["results"]] == passes
    assert [x["seconds"] for x in told["results"]] == [3.0, 4.0][: len(passes)]
    monkeypatch.setattr("attn_graph.measuring.timing.sample", interrupting(after))
    until = "figures are of the runs until then" if passes else "nothing was measured yet"
    assert f"\ninterrupted: {until}\n" in run(*line).output


def test_an_interrupt_before_any_answer_is_no_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attn_graph.cli.explain.graph_of", interrupting(0))
    monkeypatch.setattr(sys, "argv", ["attn-graph", *EXPLAINED])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_a_broken_pipe_is_no_answer() -> None:
    """Not even no: the exit code of a graph that no backend can run is another."""
    reads, writes = os.pipe()
    os.close(reads)
    line = ("explain", "--q", "1,2,8,8", "--target", "h200", "--backends", "torch_sdpa")
    program = (sys.executable, "-m", "attn_graph", *line)
    done = subprocess.run(program, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_odd_input_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    for line, told in (
        (("explain", str(tmp_path / "bytes")), "is not text"),
        (("explain", "--q", "99999999999999999999,8,64,64"), "is too large for a size"),
        (("bench", "--q", "64,64,1000000,4096"), "and this machine has"),
        (("bench", *SMALL, "--peak", "nan"), "not a rate"),
        (("bench", *SMALL, "--bandwidth", "-1"), "not a rate"),
        (("explain", *SMALL[:2], "--backends", ","), "backends= names none"),
    ):
        result = run(*line)
        assert (result.exit_code, told in " ".join(result.output.split())) == (2, True)


def test_inference_is_explained_without_a_backward() -> None:
    told = run("explain", *SMALL[:2], "--inference").output
    assert "\nbackward: " in run("explain", *SMALL[:2]).output
    assert "\nbackward: " not in told
    assert "; backward" not in told


def test_letters_that_a_terminal_has_not_are_no_error() -> None:
    done = process("mask", "4", "4", "Causal()", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 queries down" in done.stdout

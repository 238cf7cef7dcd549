"""The examples run as they are, say what they promise, and stay small."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import testing
from tests.support.sources import ROOT, load_file

HERE = ROOT / "examples"
SHORT = ("hello", "explain", "own_mask", "own_modifier", "own_backend")
MOST_LINES = 60  # one idea: more would be two


def example(name: str) -> ModuleType:
    """The example as a module, though the folder is not a package."""
    return load_file(HERE / f"{name}.py")


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the example prints."""
    example(name).main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SHORT)
def test_an_example_of_one_idea_is_short(name: str) -> None:
    assert len((HERE / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_every_example_is_tested() -> None:
    long = {"derivatives", "models", "train_gpt", "long_context", "packed_training", "serve"}
    long |= {"position_tables"}
    assert {path.stem for path in HERE.glob("*.py")} == {*SHORT, *long}


def test_hello_runs_forward_and_backward(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed("hello", capsys)
    assert "Causal() & (Window(left=64) | Prefix(length=4))" in told
    assert "math runs this on " in told
    assert "\nok: " in told
    assert told.endswith("o [2, 8, 512, 64], lse [2, 8, 512], dq [2, 8, 512, 64]\n")


def test_explain_names_backends_reasons_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed("explain", capsys)
    assert "causal: torch_sdpa, " in told
    assert "window: math, " in told
    assert "torch_sdpa and math do\ncudnn can't: needs an NVIDIA GPU" in told
    assert "triton runs this on h200 (cuda sm_90): " in told
    assert "iB backward, peak" in told


def test_models_names_who_runs_each_on_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = printed("models", capsys).splitlines()
    assert head.split()[:4] == ["h200", "a100", "b200", "cpu"]
    assert len(rows) >= 30
    known = {backend.name for backend in ag.extend.BACKENDS}
    for row in rows:
        _, *backends, memory, least = row.split()
        assert len(backends) == 4
        assert {*backends} <= known
        assert float(memory) > 0
        assert float(least) > 0


def test_tables_of_a_swin_model_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("position_tables", capsys).startswith("4 tables, gradients within ")


def test_a_mask_of_ones_own_is_right_and_skips(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed("own_mask", capsys)
    assert "\nok: " in told
    computed = float(told.split(" % of the ")[0].rsplit(maxsplit=1)[1])
    assert computed < 25, "the mask keeps 9 %; a tile or two more around it may be computed"


def test_a_mask_of_ones_own_passes_its_check() -> None:
    testing.check_mask(example("own_mask").Blocks(3))


def test_a_modifier_of_ones_own_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("own_modifier", capsys)
    assert "fade(s, fade, reach=64.0)" in text
    assert "dfade: tensor([" in text
    assert "\nok: " in text


def test_a_modifier_of_ones_own_passes_its_check() -> None:
    fade = example("own_modifier").Fade
    testing.check_modifier(fade(3))


def test_a_backend_of_ones_own_passes_its_check() -> None:
    module = example("own_backend")
    mine = ag.extend.Backend("decode", module.why_not, module.lower)
    steps = testing.shapes().map(lambda shape: evolve(shape, M=1))
    testing.check_backend(mine, graphs=testing.simple_graphs(steps, st.just(torch.float32)))


def test_a_backend_of_ones_own_runs_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed("own_backend", capsys)
    assert "decode runs this on " in told
    assert "backward: torch_sdpa runs this on " in told
    assert "\nok: " in told


def test_a_backend_of_ones_own_refuses_with_reasons() -> None:
    module = example("own_backend")
    mine = ag.extend.Backend("decode", module.why_not, module.lower)
    x = ag.TensorSpec((1, 2, 5, 8), torch.float64)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    plan = ag.compile(graph, backends=(mine, "math"), target="cpu")
    assert plan.backend == "math"
    ((name, reasons),) = plan.refusals
    assert (name, len(reasons)) == ("decode", 3)


def test_derivatives_are_those_of_the_math_path_in_less_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example asserts the numbers itself."""
    module = example("derivatives")
    monkeypatch.setattr(module, "TOKENS", 256)
    module.main()
    lines = capsys.readouterr().out.splitlines()
    steps = ("meanflow_step", "gradient_penalty", "hessian_product")
    assert [line.split(":")[0] for line in lines] == [
        f"{step}, {who}" for step in steps for who in ("ours", "math")
    ]
    most = [float(line.split(" MiB")[0].rsplit(maxsplit=1)[1]) for line in lines]
    assert all(ours < math for ours, math in zip(most[::2], most[1::2], strict=True))


@pytest.mark.slow
def test_the_models_agree_while_they_train(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The example asserts it itself, and that no plan is built after the first step."""
    monkeypatch.chdir(tmp_path)
    example("train_gpt").main(steps=3)
    told = capsys.readouterr().out
    assert "validation loss" in told
    first = " ".join(told.split("step 1 of 3: ")[0].split())
    assert "one computes attention with attn_graph, one with PyTorch's" in first
    assert "minutes on two CPU cores" in first
    (line,) = re.findall("^step 1 of 3: .*$", told, re.MULTILINE)  # no terminal: lines, no bar
    assert re.fullmatch(
        r".*attn_graph loss [\d.]+, [\d,]+ tokens/s; PyTorch loss .* tokens/s", line
    )
    assert told.index("train_gpt.png") < told.index("validation loss")
    assert "plans built after the first step: 0" in told
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_the_demo_in_one_line(tmp_path: Path) -> None:
    code = [sys.executable, "-u", str(HERE / "train_gpt.py")]
    with subprocess.Popen(
        code, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        demo.stdout.readline()
        errors = ""
        for _ in range(20):  # Python drops it in a destructor, so people press again
            demo.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                _, errors = demo.communicate(timeout=30)
                break
    assert (demo.returncode, errors) == (1, "stopped\n")


@pytest.mark.slow
def test_a_model_trains_with_its_context_divided() -> None:
    """The example asserts itself that its losses are those of one process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", str(HERE / "long_context.py")],
        env={**os.environ, "STEPS": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    causal, window, waits, losses, difference = done.stdout.splitlines()[-5:]
    assert causal == "Causal(): 393,216 bytes forward, 786,432 backward, balance 1.000"
    assert "32,256 bytes forward, 64,512 backward" in window
    assert "% overlapped" in waits
    assert "by 2 processes" in losses
    assert difference.startswith("losses of 3 steps differ by ")


@pytest.fixture
def run_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """What an example prints with other constants: it may import others, as it does when run."""

    def run(name: str, constants: dict[str, int], **sizes: int) -> str:
        monkeypatch.syspath_prepend(HERE)
        module = example(name)
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        module.main(**sizes)
        return capsys.readouterr().out

    return run


def test_packed_documents_train_as_padded_ones(run_short: Callable[..., str]) -> None:
    text = run_short("packed_training", {"LONGEST": 300}, steps=2)
    assert "2 steps of 4 documents" in text
    assert text.count("tokens/s") == 2


def test_served_answers_are_those_without_a_cache(run_short: Callable[..., str]) -> None:
    text = run_short("serve", {"NEW": 5}, steps=2, requests=8)
    assert "8 requests, 40 characters" in text
    assert "pages in use at most" in text
    assert "8 of 8 answers are those without a cache" in text

"""What all tests share: hypothesis profiles, goldens, and where a test can run."""

import os
import secrets
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import Phase, settings

from tests.support.memory import Held, memory_problem, peak_memory

HELD = Held()
STORED = TemporaryDirectory()  # no test reads what another run stored, nor leaves anything
os.environ["XDG_CACHE_HOME"] = STORED.name
# A property in well under a second; `deep` draws ten times as many.
EXAMPLES = int(os.environ.get("EXAMPLES", "25"))
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")

settings.register_profile(
    "default", max_examples=EXAMPLES, derandomize=True, deadline=None, print_blob=True
)
settings.register_profile(
    "deep", max_examples=10 * EXAMPLES, derandomize=False, deadline=None, print_blob=True
)
settings.register_profile(  # the same examples; one that fails is not made smaller
    "unshrunk", settings.get_profile("default"), phases=(Phase.explicit, Phase.generate)
)
settings.register_profile(  # for what shows that a property can be asked
    "few", settings.get_profile(PROFILE),
    max_examples=max(1, settings.get_profile(PROFILE).max_examples // 5),
)  # fmt: skip
settings.load_profile(PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --update-golden` writes the goldens instead of comparing with them.

    The others are for tests/lowering/test_cudnn_grid.py.
    """
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")
    parser.addoption("--cudnn-python", default=sys.executable, help="whose cuDNN to ask")
    parser.addoption("--every-plan", action="store_true", help="build all of the grid's plans")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads the seed
def pytest_configure(config: pytest.Config) -> None:
    """Beside other xdist workers one thread each: more would wait for each other. Triton's
    interpreter is spared what it does again and again.

    A run in the background of a script ignores Ctrl-C, and what tests start would do so too: it
    does not from here on.

    Where examples are random, all come from one seed; workers inherit it by the environment.
    """
    from attn_graph.machine.target import triton_interprets

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if triton_interprets():
        from tests.support.interpreter import spare_repetition

        spare_repetition()
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    if PROFILE == "deep" and config.option.hypothesis_seed is None:
        seed = os.environ.setdefault("HYPOTHESIS_SEED", str(secrets.randbelow(2**32)))
        config.option.hypothesis_seed = seed


def pytest_report_header(config: pytest.Config) -> str | None:
    """The seed, with which the same examples come again."""
    seed = config.option.hypothesis_seed
    return f"random examples: make deep SEED={seed} draws the same" if PROFILE == "deep" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test fails that takes more memory than two at once may."""
    before = peak_memory()
    result = yield
    if problem := memory_problem(before, peak_memory()):
        pytest.fail(problem)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Two workers stay below 6 GiB at the end of a run as they do at its beginning."""
    result = yield
    HELD.give_back()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is false")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def few_examples() -> Iterator[None]:
    """Few draws: what these would find is tested where it is."""
    settings.load_profile("few")
    yield
    settings.load_profile(PROFILE)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """`golden(x)`: str(x) is what golden/<file>/<test>.txt holds."""
    here = Path(__file__).parent / "golden"
    path = here / request.path.stem / f"{request.node.name}.txt"

    def check(value: object) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n", encoding="utf-8")
        assert path.exists(), f"no {path}: run pytest --update-golden and read the diff"
        assert f"{value}\n" == path.read_text(encoding="utf-8")

    return check

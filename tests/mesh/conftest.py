"""Four processes for all tests of meshes that leave them as they were."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Crew, start_crew


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with start_crew(4, tmp_path_factory.mktemp("ranks")) as crew:
        yield crew

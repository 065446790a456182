"""How pytest-xdist distributes the tests: by file, but all files of an adapter's library go to one worker.

Every rank of a worker imports the library, which takes seconds.
"""

from __future__ import annotations

from typing import Any

import pytest


def scope(nodeid: str) -> str:
    """Return the scope of a test: its file, or for a test of an adapter its library."""
    file = nodeid.partition("::")[0]
    folder, _, name = file.rpartition("/")
    return f"{folder}/{'_'.join(name.split('_')[:2])}" if folder.endswith("adapters") else file


def by_file_and_library(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFileAndLibrary(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return ByFileAndLibrary(config, log)

"""Which tests one process of pytest-xdist gets together."""

from __future__ import annotations

from pathlib import Path

import sharing

ADAPTERS = Path(__file__).parents[1] / "adapters"


def test_the_tests_of_a_library_go_to_one_process():
    files = [f"tests/adapters/{path.name}::test_it[a/b::c]" for path in ADAPTERS.glob("test_lightning_*.py")]
    assert len(files) > 1
    assert {sharing.scope(file) for file in files} == {"tests/adapters/test_lightning"}


def test_other_files_are_shared_out_by_themselves():
    assert sharing.scope("tests/ops/test_exact_cuda.py::test_it[2-a::b]") == "tests/ops/test_exact_cuda.py"


def test_pytest_xdist_asks_for_it(pytestconfig):
    manager = pytestconfig.pluginmanager
    hooks = manager.hook.pytest_xdist_make_scheduler.get_hookimpls() if manager.hasplugin("xdist") else []
    assert not manager.hasplugin("xdist") or any("conftest" in (hook.plugin_name or "") for hook in hooks)

"""What .ci/run sets beyond what a developer's build has."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="an sdist has no .ci")
def test_warnings_fail_the_build_in_ci_and_nowhere_else():
    assert "\nexport PYENGINE_WERROR=1" in (ROOT / ".ci" / "run").read_text().partition("\nmake")[0]
    cmake = (ROOT / "CMakeLists.txt").read_text()
    option, _, rest = cmake.partition("option(PYENGINE_WERROR ")[2].partition("\n")
    assert option.endswith(" OFF)")
    block, _, others = rest.partition("endif()")
    assert "LANGUAGE:CXX>:-Werror" in block and "LANGUAGE:CUDA>:SHELL:-Werror all-warnings" in block
    assert "Werror" not in cmake.partition("option(PYENGINE_WERROR")[0] + others
    assert 'switch("PYENGINE_WERROR")' in (ROOT / "setup.py").read_text()

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from mutate.mutant import Mutant, StaleMutantError
from mutate.mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_still_fits_its_file_and_names_tests_that_exist(
    mutant: Mutant, repo_root: Path
) -> None:
    text = (repo_root / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        if not name:
            assert (repo_root / f"{path}.cpp").is_file()
            continue
        names = re.split(r"::|\[", name)
        source = (repo_root / path).read_text()
        assert all(
            re.search(rf"(def|class) {n}\b|^{n} = ", source, re.MULTILINE) for n in names[:2]
        )


def test_names_are_unique_and_at_least_twenty_five_faults_are_listed() -> None:
    assert len(MUTANTS) >= 25
    assert not [name for name, times in Counter(m.name for m in MUTANTS).items() if times > 1]


def test_a_fault_stands_only_while_it_is_applied(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a = b + 1\n")
    mutant = Mutant("off by one", "file", "b + 1", "b", ("tests/x.py::test_x",))
    with mutant.applied(tmp_path):
        assert file.read_text() == "a = b\n"
        with pytest.raises(StaleMutantError, match="0 times"):
            mutant.faulty(tmp_path)
    assert file.read_text() == "a = b + 1\n"


def test_a_mutant_whose_text_stands_twice_is_stale(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x x")
    with pytest.raises(StaleMutantError, match="2 times"):
        Mutant("twice", "file", "x", "y", ("tests/x.py::test_x",)).faulty(tmp_path)

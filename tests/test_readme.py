"""What the README says to type works."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_runs_and_converges(capsys):
    (code,) = (block for block in BLOCKS if "solve_limit" in block)
    names = {}
    exec(code, names)
    assert names["limit"].status == "converged"
    printed = capsys.readouterr().out
    assert "converged" in printed and "tensor(" in printed

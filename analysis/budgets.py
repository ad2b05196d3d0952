"""Print the size of every wing beside its limit and its goal, and fail above a limit: `python -m analysis.budgets`.

A reader should be able to hold a wing in mind. Lines are those of files, with comments and blank lines. A limit that is
above its goal is the size that was reached: lower it with every file that shrinks, and raise it for a feature alone.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_longctx"
GOALS = {"core": 8_000, "the package": 29_000, "tests": 30_000}
LIMITS = {"the package": 45_294, "tests": 42_378}
WING, FILE, FUNCTION = 9_000, 400, 60


def sources(folder: str) -> list[Path]:
    """Return the Python files of a folder that git tracks, or all of them where git is missing."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/**.py"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [ROOT / name for name in names if (ROOT / name).is_file()] or sorted((ROOT / folder).rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_functions(path: Path) -> list[tuple[str, int]]:
    """Return the functions that are too long. Triton's kernels are left out: a kernel is one function at any length."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION and not any("jit" in ast.unparse(each) for each in node.decorator_list):
                found.append((node.name, size))
    return found


def main() -> int:
    package = sources(PACKAGE)
    wings: Counter[str] = Counter()
    for path in package:
        wings[path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")] += lines(path)
    sizes = {
        **dict(sorted(wings.items())),
        "the package": sum(wings.values()),
        "tests": sum(map(lines, sources("tests"))),
    }
    over = []
    for name, size in sizes.items():
        goal = GOALS.get(name, WING)
        limit = max(goal, LIMITS.get(name, 0))
        print(f"{name:<12} {size:>7,} lines, limit {limit:>6,}, goal {goal:>6,}")
        if size > limit:
            over.append(f"{name}: {size:,} lines, at most {limit:,}")
    for path in package:
        file = path.relative_to(ROOT)
        if lines(path) > FILE:
            over.append(f"{file}: {lines(path)} lines, at most {FILE}")
        over += [f"{file}: {f} has {n} lines, at most {FUNCTION}" for f, n in long_functions(path)]
    for each in over:
        print(f"over budget: {each}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

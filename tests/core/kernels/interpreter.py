"""Triton kernels without a GPU."""

import functools
import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_longctx.testing.distributed import PATIENCE_S
from megatron_longctx.training.ranks import run_ranks


def run_interpreted(*modules: str) -> None:
    """Run modules as `__main__` in forks of a process under Triton's interpreter.

    The interpreter can only be switched on before triton is imported. Skips the test if triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    root = Path(__file__).parents[3]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", __name__, *modules]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def run_forked(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run ranks as forks of this process, which has imported their modules and the interpreter."""
    return run_ranks(fn, world_size, *args, timeout=PATIENCE_S, threads=1, start_method="fork")


def hopper_code(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], **options: int) -> str:
    """Compile a kernel to PTX without a GPU, since the interpreter accepts more than the compiler does.

    types: the types of arguments that are not i32. Names that the kernel does not have are ignored.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    chosen = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in chosen else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=chosen)
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert ".target sm_90" in code
    return str(code)


if __name__ == "__main__":
    from triton.runtime import interpreter

    # In every call of a function of a kernel it replaces those of the language, for a third of the time: here, once.
    replace, done = interpreter._patch_lang, SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = functools.cache(lambda fn: (replace(fn), done)[1])
    for module in sys.argv[1:]:
        if os.fork() == 0:
            sys.argv[:] = [module]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit()
        assert os.wait()[1] == 0, module

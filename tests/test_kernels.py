"""Triton kernels without a GPU: interpreted, and compiled for one. `make test-kernels` installs triton for it.

Elsewhere they are skipped unless torch has brought triton along, as CUDA builds do.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def run(*arguments: str, interpreted: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpreted}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "kernel", ["attention", "parts", "packed", "padded", "sampling", "writing", "layers", "scoring", "head", "digests"]
)
def test_a_kernel_interpreted_computes_what_torch_does(kernel):
    run("-m", "tests.interpreted", kernel, interpreted="1")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from solera.engines import kernels as engine
from solera.learner import kernels as learner
from solera.models import kernels as models

def compile(kernel, types, constants, **options):
    signature = {name: "constexpr" if name in constants else types.get(name, types["*"]) for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options)

heads = {"HEADS": 3, "GROUP": 3, "TILE": 8, "DIM": 64, "WIDTH": 64, "PAGE": 128, "UNIT": 128 * 3 * 64}
rows = {name: "*i64" for name in ("page_ptr", "prompt_length", "response_length", "alive_ptr")} | {"page_row": "i32"}
for number in ("fp16", "bf16", "fp32"):
    types = {"*": f"*{number}", "scale": "fp32", "epsilon": "fp32", **rows}
    types |= {"query_row": "i32", "key_row": "i32", "value_row": "i32"}
    constants = {**heads, "PRECISION": "ieee" if number == "fp32" else "tf32"}
    for block, rotated, normed in ((32, False, False), (32, True, False), (128, True, True)):
        special = {"BLOCK": block, "ROTATE": rotated, "NORM": normed}
        compile(engine._decode_attention, types, constants | special, num_warps=2, num_stages=2)
    types |= dict.fromkeys(("query_place", "query_head", "turn", "shared", "count"), "i32")
    tiles = {**heads, "QUERIES": 64, "KEYS": 64, "PRECISION": constants["PRECISION"]}
    del tiles["TILE"]
    compile(engine._attend_to_pages, types, tiles, num_warps=4, num_stages=3)
    types = {"*": f"*{number}", "page_ptr": "*i64", "at_ptr": "*i64"}
    types |= {f"{part}_{by}": "i32" for part in ("key", "value") for by in ("place", "head")}
    compile(engine._keep, types, {"HEADS": 3, "DIM": 64, "TILE": 4, "WIDTH": 64, "UNIT": 64 * 3 * 64})
    sizes = {"QUERIES": 9, "KEYS": 3, "DIM": 64, "WIDTH": 64, "QUERY_TILE": 16, "KEY_TILE": 4}
    for normed in (False, True):
        compile(engine._rotate, {"*": f"*{number}", "epsilon": "fp32"}, sizes | {"NORM": normed})
    types = {"*": f"*{number}", "width": "i32", "inner": "i32", "epsilon": "fp32"}
    compile(engine._add_norm, types, {"ADD": True, "WIDTH": 1024})
    compile(engine._gate, types, {"BLOCK": 1024})
    compile(engine._embed, types | {"token_ptr": "*i64"}, {"INNER": 1024})
    parts = [f"{part}_{by}" for part in ("query", "key", "value", "grad") for by in ("place", "head")]
    types = {"*": f"*{number}", "scale": "fp32", "tile_ptr": "*i32", "places": "i32", **dict.fromkeys(parts, "i32")}
    types |= {"norm_ptr": "*fp32", "pull_ptr": "*fp32"}
    sizes = {"HEADS": 9, "GROUP": 3, "DIM": 64, "WIDTH": 64, "QUERIES": 64, "KEYS": 64}
    sizes["PRECISION"] = constants["PRECISION"]
    for kernel in (models._attend, models._differentiate_queries, models._differentiate_keys):
        compile(kernel, types, sizes, num_warps=4, num_stages=3)
types = {"*": "*fp32", "token_ptr": "*i64", "target_ptr": "*i64", "vocabulary": "i32", "inverse_temperature": "fp32"}
compile(engine._sample, types, {"BLOCK": 4096, "BLOCKS": 16}, num_warps=4)
numbers = ("ends_ptr", "token_ptr", "position_ptr", "step_ptr", "request_ptr", "alive_ptr", "limit_ptr", "length_out")
written = types | dict.fromkeys(numbers, "*i64") | {"token_out": "*i32", "finished_out": "*i8"}
written |= {"longest": "i32", "ends": "i32"}
compile(engine._write, written, {"ENDS": 2, "BLOCK": 4096, "BLOCKS": 16}, num_warps=4)
compile(learner._score, types, {"BLOCK": 4096}, num_warps=8)
compile(learner._differentiate, types, {"BLOCK": 4096, "WITH_ENTROPY": True}, num_warps=8)
"""

FIT = """
import subprocess, re, sys
from pathlib import Path
import torch, triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from solera.engines.kernels import _decode_attention as kernel, _key_blocks
from solera.engines.pages import PAGE

def programs(few):
    "How many programs of an H200's processor run at once."
    options = _key_blocks(few, torch.empty(1, PAGE, 3, 64, dtype=torch.float16))
    sizes = {"HEADS": 3, "GROUP": 3, "TILE": 8, "DIM": 64, "WIDTH": 64, "PAGE": PAGE, "UNIT": PAGE * 3 * 64}
    constants = sizes | {"BLOCK": options.pop("BLOCK"), "PRECISION": "tf32", "ROTATE": True, "NORM": False}
    types = dict.fromkeys(("page_ptr", "prompt_length", "response_length", "alive_ptr"), "*i64")
    types |= {"scale": "fp32", "epsilon": "fp32", "page_row": "i32"}
    types |= {"query_row": "i32", "key_row": "i32", "value_row": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp16") for name in kernel.arg_names}
    aligned = [n for n, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name.endswith("_row")]
    source = ASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert re.search(r"cp.async.cg.shared.global .*, 0x10", compiled.asm["ptx"]), "not 16 bytes at a time"
    cubin = Path(sys.argv[1]) / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    used = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    registers = int(re.search(r"REG:(\\d+)", used.stdout + used.stderr)[1])
    by_registers = 65536 // (32 * options["num_warps"] * -(-registers // 8) * 8)
    by_memory = 228 * 1024 // (compiled.metadata.shared + 1024)
    return min(by_registers, by_memory)

assert 132 * programs(few=False) >= 512 * 3
assert programs(few=True) >= 2  # three with Triton 3.6, which keeps one block less at a time
"""

BIND = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from solera.models import kernels

backend = make_backend(GPUTarget("cuda", 90, 32))
for kernel in (kernels._attend, kernels._differentiate_queries, kernels._differentiate_keys):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def kinds(places):
        strides = iter([576, 64, places * 64, 64, 192, 64, 576, 64])
        given = {"places": places, "scale": 0.125}
        for name in kernel.arg_names:
            if name.endswith("_ptr"):
                given[name] = torch.zeros(64, dtype=torch.float16)
            elif name not in given:
                given[name] = 64 if name.isupper() else next(strides)
        return bind(**given)[1]

    assert kinds(32) == kinds(33) == kinds(1), kernel
    assert ("i32", "D") in kinds(33)
"""


def test_a_batch_of_another_size_needs_no_kernel_of_its_own():
    """Compiling one takes a second of a step; strides are known to be multiples of 16 all the same."""
    run("-c", BIND, interpreted="0")


def test_kernels_compile_for_an_h100():
    """The interpreter takes what the compiler refuses: a name with two shapes in a loop."""
    run("-c", COMPILE, interpreted="0")


def test_512_rows_of_smollm2_attend_all_at_once_on_an_h200(tmp_path):
    """132 processors, each with 65,536 registers and 228 KiB of shared memory, of which a program takes 1 KiB more than
    it asks for. A program that does not fit begins when others have ended."""
    run("-c", FIT, str(tmp_path), interpreted="0")

#!/usr/bin/env python3
"""Build the emulated Ascend device for the installed MindSpore wheel.

MindSpore's Ascend plugin needs Huawei's CANN libraries. This program reads from the wheel which functions of CANN it
wants, and makes libraries of the same names that have them all: those of `src/*.cc` really work, on this machine's
memory; every other one is a stub that says its name. Needs g++ and binutils; takes half a minute. `run.sh` calls it.

usage: build.py [--out FOLDER]     prints the environment as `export` lines
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
_LOG_LEVEL = "GLOG_v"
"""MindSpore's own name for it."""
KNOWN_WHEELS = ("2.9.0", "2.10.0")
"""Versions of MindSpore whose wheel was tried: which functions it calls, and how, differs between versions."""

CANN_VERSION = "9.1.0"
COMMON_FLAGS = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off"]
COMMON_FLAGS += ["-D_GLIBCXX_USE_CXX11_ABI=0"]  # CANN's C++ is of the old ABI
# Most of it is quick enough as it is, and half of the building time is optimising.
QUICK = "-O1"
OPTIMISED = {"matrix.cc": ["-O3", "-march=native"], "tensor.cc": ["-O2"]}

# Operators are named all over the plugin, with or without the suffix of their first phase.
FIRST_PHASE = "GetWorkspaceSize"
# Looked up at run time under names that stand in no header and no list of the wheel.
LOOKED_UP = [
    "aclnnInit",
    "aclnnFinalize",
    "aclDestroyAclOpExecutor",
    "aclSetAclOpExecutorRepeatable",
    "aclSetTensorAddr",
    "aclSetDynamicTensorAddr",
    "HcclSetConfig",
    "InitHugeMemThreadLocal",
    "UnInitHugeMemThreadLocal",
    "ReleaseHugeMem",
    "aclrtSynchronizeDevice",
]
# Opened at run time by these names.
OPENED = [
    "libopapi.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "liberror_manager.so",
    "libprofapi.so",
    "libascend_ml.so",
    "libopapi_math.so",
    "libopapi_nn.so",
    "libopapi_transformer.so",
    "libopapi_cv.so",
]
SYSTEM_LIBRARIES = ("libc", "libm", "libstdc++", "libgcc_s", "libgomp", "libpthread", "libdl", "librt", "libz")
# No name may contain "cann": MindSpore takes the folder before it for CANN's root.
IMPLEMENTATION = "libascsim.so"


class BuildError(RuntimeError):
    """The emulator can't be built here; the message says why and what to do."""


def output_of(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False).stdout


def call(*command: str | Path) -> None:
    """Run a compiler; its own words are the error's."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(str(part) for part in command)} failed:\n{done.stderr[-4000:]}")


def need_tools() -> None:
    """Name the tools that aren't there, and where to get them."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise BuildError(f"the Ascend emulator runs on x86-64 Linux, not on {platform.machine()} {sys.platform}")
    missing = [tool for tool in ("g++", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise BuildError(
            f"the Ascend emulator is built with g++ and binutils, and {' and '.join(missing)} can't be found: install "
            f"them (Debian, Ubuntu: apt-get install g++ binutils)"
        )


def wheel() -> tuple[Path, str]:
    """MindSpore's folder and version, without importing it.

    Raises:
        BuildError: There is no MindSpore, it has no Ascend plugin, or its version wasn't tried.
    """
    found = importlib.util.find_spec("mindspore")
    if found is None or found.origin is None:
        raise BuildError(f"there is no MindSpore for {sys.executable}: install one of {', '.join(KNOWN_WHEELS)}")
    version = importlib.metadata.version("mindspore")
    if version not in KNOWN_WHEELS:
        raise BuildError(
            f"the wheel of MindSpore {version} is unknown to the Ascend emulator: it was tried with "
            f"{', '.join(KNOWN_WHEELS)}; other versions call other functions of CANN, or in another way"
        )
    folder = Path(found.origin).parent
    if not (folder / "lib/plugin/libmindspore_ascend.so.2").exists():
        raise BuildError(f"the MindSpore in {folder} has no Ascend plugin (lib/plugin/libmindspore_ascend.so.2)")
    return folder, version


def read_sources() -> dict[str, bytes]:
    """The sources as they are now: what is built is what the key was made of, whatever is edited meanwhile."""
    return {source.name: source.read_bytes() for source in sorted(SOURCES.iterdir())}


def key(sources: dict[str, bytes]) -> str:
    """What a build depends on: the sources, the wheel, the compiler, and what this processor can do."""
    folder, version = wheel()
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name, text in sources.items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    flags = re.search(r"^flags\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
    facts = [version, str(folder), output_of("g++", "--version"), flags.group() if flags else ""]
    digest.update("\0".join(facts).encode())
    return f"{version}-{digest.hexdigest()[:16]}"


def default_folder() -> Path:
    """Where builds are kept: `$ASCSIM_BUILD_DIR`, else in the user's cache."""
    chosen = os.environ.get("ASCSIM_BUILD_DIR")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hyper_parallel" / "ascend_emulator"


def symbols(library: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Kind and name of a library's dynamic symbols."""
    for line in output_of("nm", "-D", *options, library).splitlines():
        parts = line.split()
        yield parts[-2], parts[-1].split("@")[0]


def strings(library: Path, pattern: bytes) -> set[str]:
    """The names in a library's bytes that match."""
    return {match.decode() for match in re.findall(pattern, library.read_bytes())}


class Wanted:
    """What MindSpore's Ascend plugin wants of CANN: functions, operators, and libraries by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plugin = folder / "lib/plugin"
        users = [plugin / "libmindspore_ascend.so.2", plugin / "libmindspore_ops_ascend.so"]
        users += [f for f in (plugin / "ascend").glob("*.so") if "cpu_kernels" not in f.name and "dvpp" not in f.name]
        users += (plugin / "ascend").glob("ms_kernels_*/**/lib/*.so")
        users += [plugin / "ascend/custom_ascendc_910b/op_api/lib/libcust_opapi.so"]
        users += [plugin / "ascend/custom_aicpu_ops/op_proto/libcust_op_proto.so"]
        self.users = sorted({f for f in users if f.exists()})
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self.functions = self._functions(pool)
            self.operators = self._operators(pool)
            self.libraries = self._libraries(pool)
        self.functions |= self.operators | {name + FIRST_PHASE for name in self.operators}

    def _system_libraries(self) -> list[Path]:
        paths = [Path(word) for word in output_of("/sbin/ldconfig", "-p").split() if word.startswith("/")]
        return [path for path in paths if path.name.split(".so")[0] in SYSTEM_LIBRARIES]

    def _functions(self, pool: concurrent.futures.Executor) -> set[str]:
        own = [*(self.folder / "lib").glob("*.so*"), *self.folder.glob("*.so*")]
        defined: set[str] = set()
        for found in pool.map(
            lambda f: {name for _, name in symbols(f, "--defined-only")}, [*own, *self.users, *self._system_libraries()]
        ):
            defined |= found
        wanted = set(LOOKED_UP)
        for found in pool.map(lambda f: {n for kind, n in symbols(f, "--undefined-only") if kind == "U"}, self.users):
            wanted |= {name for name in found - defined if not name.startswith(("Py", "_Py"))}
        ascend = self.folder / "lib/plugin/ascend"
        for name in ("libd_collective.so", "libmindspore_ascend_res_manager.so", "libhccl_plugin.so"):
            if (ascend / name).exists():
                wanted |= strings(ascend / name, rb"(?<=\x00)Hccl[A-Z][A-Za-z0-9_]{3,60}(?=\x00)")
        for header in (self.folder / "include/mindspore/ccsrc/plugin/ascend").glob("**/*symbol*.h"):
            macro = r"^(?:ORIGIN_METHOD\w*|ACLRT_GET_SOC_NAME_WITH_SIMU)\(\s*(\w+)"
            wanted |= set(re.findall(macro, header.read_text(), re.M))
        return wanted

    def _operators(self, pool: concurrent.futures.Executor) -> set[str]:
        found: set[str] = set()
        for names in pool.map(
            lambda f: strings(f, rb"aclnn[A-Z][A-Za-z0-9_]*"), [*self.users, *(self.folder / "lib").glob("*.so*")]
        ):
            found |= {name.removesuffix(FIRST_PHASE) for name in names}
        return found - {"aclnnInit", "aclnnFinalize"}

    def _libraries(self, pool: concurrent.futures.Executor) -> list[str]:
        there = {f.name for f in self.folder.glob("**/*.so*")} | {f.name for f in self._system_libraries()}
        there.add("ld-linux-x86-64.so.2")
        needed: set[str] = set(OPENED)
        for text in pool.map(lambda f: output_of("readelf", "-d", f), self.users):
            needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
        return sorted(needed - there)


def stubs(missing: Iterable[str], operators: set[str]) -> str:
    """Assembler text: a function for every name that the sources don't define."""
    text, names = [".text"], []
    for number, name in enumerate(sorted(missing)):
        text += [f".globl {name}", f".type {name},@function", f"{name}:", "  endbr64"]
        if name in operators:  # the second phase, which is the same for all
            text += ["  jmp ascsim_launch@PLT"]
        else:
            text += [f"  lea .Lname{number}(%rip), %rdi", "  jmp ascsim_missing@PLT"]
            names.append(f'.Lname{number}: .string "{name}"')
        text += [f".size {name}, .-{name}"]
    return "\n".join([*text, ".section .rodata", *names, '.section .note.GNU-stack,"",@progbits', ""])


def compile_all(
    folder: Path, objects: Path, pool: concurrent.futures.Executor
) -> list[concurrent.futures.Future[Path]]:
    """Begin to compile every source file of a folder, the largest first."""

    def compile_one(source: Path) -> Path:
        made = objects / f"{source.stem}.o"
        call("g++", *COMMON_FLAGS, *OPTIMISED.get(source.name, [QUICK]), "-c", "-o", made, source)
        return made

    sources = sorted(folder.glob("*.cc"), key=lambda f: f.stat().st_size, reverse=True)
    return [pool.submit(compile_one, source) for source in sources]


def build_into(out: Path, sources: dict[str, bytes]) -> None:
    """Build everything into an empty folder."""
    folder, _ = wheel()
    root = out / "cann"
    libraries, objects, source_folder = root / "lib64", out / "objects", out / "src"
    for made in (libraries, objects, source_folder):
        made.mkdir(parents=True)
    for name, text in sources.items():
        (source_folder / name).write_bytes(text)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = compile_all(source_folder, objects, pool)
        wanted = Wanted(folder)
        made_objects = [one.result() for one in compiling]
        defined = {
            line.split()[-1]
            for o in made_objects
            for line in output_of("nm", "--defined-only", "-g", o).splitlines()
            if line
        }
        (objects / "stubs.s").write_text(stubs(wanted.functions - defined, wanted.operators))
        implementation = libraries / IMPLEMENTATION
        call("g++", "-shared", "-fPIC", "-o", implementation, *made_objects, objects / "stubs.s", "-ldl", "-lpthread")
        # One file for each name: MindSpore asks from which file a function came.
        empty = ["-x", "c", "/dev/null", "-Wl,--no-as-needed", f"-L{libraries}", "-lascsim", "-Wl,-rpath,$ORIGIN"]
        linking = [
            pool.submit(call, "g++", "-shared", "-fPIC", "-o", libraries / name, *empty, f"-Wl,-soname,{name}")
            for name in wanted.libraries
        ]
        for one in linking:
            one.result()
    shutil.rmtree(objects)
    write_folders(root)
    (out / "environment.json").write_text(json.dumps(environment(folder, wanted.users), indent=1))


def write_folders(root: Path) -> None:
    """The files of a CANN installation that MindSpore looks at."""
    for part in ("compiler", "runtime", "opp", "toolkit"):
        (root / part).mkdir()
        (root / part / "version.info").write_text(f"Version={CANN_VERSION}\n")
    for part in ("opp/vendors", "tools/hccl"):
        (root / part).mkdir(parents=True)
    hccl = root / "opp/built-in/op_impl/ai_core/tbe/hccl"
    hccl.mkdir(parents=True)
    (hccl / "__init__.py").write_text("")
    (hccl / "sys_version.py").write_text(f'__sys_version__ = "{CANN_VERSION}"\n')


def environment(folder: Path, users: Iterable[Path]) -> dict[str, str]:
    """The variables for MindSpore; `{root}` stands for the build's folder, which is moved after building.

    A build serves every checkout with the same sources, so nothing here may lead back into one of them.
    """
    plugin = folder / "lib/plugin"
    search = [plugin, plugin / "ascend", folder / "lib", *sorted({f.parent for f in users if "ms_kernels" in str(f)})]
    return {
        "ASCEND_HOME_PATH": "{root}/cann",
        "ASCEND_TOOLKIT_HOME": "{root}/cann",
        "ASCEND_OPP_PATH": "{root}/cann/opp",
        "PYTHONPATH": "{root}/cann/opp/built-in/op_impl/ai_core/tbe",
        "LD_LIBRARY_PATH": ":".join(["{root}/cann/lib64", *map(str, search)]),
        "ASCSIM_LIBRARY": f"{{root}}/cann/lib64/{IMPLEMENTATION}",
    }


def build(out: str | Path | None = None) -> dict[str, str]:
    """Build the emulator, unless that was done before, and return the environment that a program needs to run on it.

    Builds are kept by what they are made of. Callers at the same time wait for the first one.

    Args:
        out: Folder for the builds. Default: `$ASCSIM_BUILD_DIR`, else a folder in the user's cache.

    Returns:
        Environment variables; `PYTHONPATH` and `LD_LIBRARY_PATH` come before what these are now.

    Raises:
        BuildError: A tool is missing, the wheel is unknown, or a source doesn't compile.
    """
    need_tools()
    folder = Path(out) if out is not None else default_folder()
    sources = read_sources()
    done = folder.resolve() / key(sources)
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as temporary:
                    made = Path(temporary) / "build"
                    build_into(made, sources)
                    made.rename(done)
    variables = json.loads((done / "environment.json").read_text())
    result = {name: value.replace("{root}", str(done)) for name, value in variables.items()}
    result["PYTHONPATH"] += f":{SOURCES.parent / 'python'}"
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        if os.environ.get(name):
            result[name] += ":" + os.environ[name]
    # MindSpore's notes on CANN's Python packages, which it does without, are CRITICAL.
    result["GLOG_v"] = os.environ.get(_LOG_LEVEL, "4")
    return result


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the emulated Ascend device; prints its environment.")
    parser.add_argument("--out", type=Path, help="folder for the builds (default: in the user's cache)")
    arguments = parser.parse_args()
    try:
        variables = build(arguments.out)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Builds stand-ins for the CUDA libraries that torch is linked to, so that it can be imported where there is no GPU.

Every symbol that torch imports from them is exported and answers "no device"; on a CPU none is ever called.
usage: cuda_stubs.py SITE_PACKAGES OUT, then run Python with LD_LIBRARY_PATH=OUT. Needs gcc and readelf.
"""

import collections
import pathlib
import re
import subprocess
import sys

LIBRARY = re.compile(r"lib(cud|cupti|cusp|cufft|cufile|nccl|curand|cublas|nvrtc|cusolver|nvshmem|nvJitLink|nvToolsExt|cuda)")
SYMBOL = re.compile(r"(__cuda|cu[a-zA-Z]|nccl|nvrtc|nvshmem)")
TEXT = re.compile(r"(Get(Error|Result)?(String|Name)$|GetErrorString|GetLastErrorString)")
NO_DEVICE = 100  # cudaErrorNoDevice
UNVERSIONED = {"cufile": "cuFile", "cusparseLt": "cusparseLt", "nccl": "nccl", "cudnn": "cudnn"}


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def imports(site):
    """The libraries torch needs and the symbols it imports, by version tag."""
    objects = [*site.glob("torch/lib/*.so"), *site.glob("torch/_C*.so")]
    own = {path.name for path in objects}
    libraries, symbols = set(), collections.defaultdict(set)
    for path in objects:
        needed = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-dW", str(path)))
        needed = {name for name in needed if LIBRARY.match(name) and name not in own}
        libraries |= needed
        if not needed:
            continue
        for line in run("readelf", "-W", "--dyn-syms", str(path)).splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                name, _, version = fields[7].partition("@")
                if SYMBOL.match(name):
                    symbols[version.strip("@")].add(name)
    return libraries, symbols


def exports(library, symbols):
    """Which of the symbols this library must export, by version tag."""
    base = re.match(r"lib(\w+?)\.so", library).group(1)
    versioned = {v: s for v, s in symbols.items() if v == library or (v == "NVSHMEM" and base.startswith("nvshmem"))}
    if versioned:
        return versioned
    prefix = UNVERSIONED.get(base, base)
    loose = {v: s for v, s in symbols.items() if v in ("", library) or not v.startswith("lib")}
    return {"": {name for names in loose.values() for name in names if name.startswith(prefix)}}


def build(library, tags, out):
    source = ['static const char *text = "no CUDA device";']
    script = []
    for version, names in tags.items():
        for name in sorted(names):
            if TEXT.search(name):
                source.append(f"const char *{name}(void) {{ return text; }}")
            else:
                source.append(f"long {name}(void) {{ return {NO_DEVICE}; }}")
        if version:
            script.append(f"{version} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};")
    c_file, map_file = out / f"{library}.c", out / f"{library}.map"
    c_file.write_text("\n".join(source) + "\n")
    command = ["gcc", "-w", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library}", "-o", str(out / library), str(c_file)]
    if script:
        map_file.write_text("\n".join(script))
        command.insert(1, f"-Wl,--version-script={map_file}")
    subprocess.run(command, check=True)
    c_file.unlink()
    map_file.unlink(missing_ok=True)


def main():
    site, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    libraries, symbols = imports(site)
    for library in sorted(libraries):
        build(library, exports(library, symbols), out)
    print(f"{len(libraries)} stand-ins in {out}")


main()

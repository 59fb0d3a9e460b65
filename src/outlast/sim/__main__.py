"""`python -m outlast.sim --seeds 0:1000 [--mode exact|float] [--trace SEED]`."""

import argparse
import time

from outlast.sim.run import simulate


def main() -> int:
    """Run seeds, say what failed."""
    parser = argparse.ArgumentParser(prog="python -m outlast.sim", description="The step protocol under seeded faults.")
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END")
    parser.add_argument("--mode", choices=("exact", "float"), default="exact")
    parser.add_argument("--trace", type=int, metavar="SEED", help="replay one seed and print what happens")
    args = parser.parse_args()
    exact = args.mode == "exact"
    if args.trace is not None:
        lines: list[str] = []
        result = simulate(args.trace, exact=exact, trace=lines)
        print("\n".join(lines))
        return 1 if result.violation else 0
    first, end = map(int, args.seeds.split(":"))
    started = time.perf_counter()
    results = [simulate(seed, exact=exact) for seed in range(first, end)]
    took = time.perf_counter() - started
    failed = [r for r in results if r.violation]
    for r in failed[:20]:
        print(f"seed {r.seed}: {r.violation}")
    faults = sum(r.faults for r in results)
    print(
        f"{len(results)} runs in {took:.1f} s ({len(results) / took:.0f} a second), {faults} faults, "
        f"{sum(r.commits for r in results)} commits, {sum(r.refused for r in results)} refused for good, longest "
        f"{max(r.after_faults_s for r in results):.0f} s after the last fault; {len(failed)} broke a promise"
    )
    return 1 if failed else 0


raise SystemExit(main())

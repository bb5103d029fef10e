"""Jobs whose ranks do unequal work beside their training: forwards without gradients (no micro-batch) of 20 or 30 ms, then one micro-batch of 36 ms forward and 72 ms backward, all-reduce 5 ms, optimizer 5 ms; 40 steps. Arguments: spool, mode, ranks, and for evaluations every how many steps."""
import sys, random
from mk import *
spool, mode, world = sys.argv[1], sys.argv[2], int(sys.argv[3]); every = int(sys.argv[4]) if len(sys.argv) > 4 else 1
rng = random.Random(7); ranks = [Rank(spool, mode, r, world) for r in range(world)]
def calls(rank, step):
    late = rank == 1 and step >= 12
    return {
        "twice": [20] * (24 if late else 12),                              # rank 1 generates twice the tokens
        "turns": [20] * rng.randint(6, 24),                                # lengths change on all ranks
        "batch": [40 if late else 20] * 12,                                # rank 1 has twice the batch: longer calls, not more
        "cache": [10 + i for i in range(24 if late else 12)],              # calls grow with the cache of keys and values
        "device": [26 if late else 20] * 12,                               # the device of rank 1 is slow, in all that it does
        "always": [26 if rank == 1 else 20] * 12,                          # the same from the first step on
        "always-more": [26] * 24 if rank == 1 else [20] * 12,              # it also generates twice the tokens
        "teacher": [39 if late else 30],                                   # a frozen model in each step, the device of rank 1 is slow
        "all": [30] * 6 if step % every == 0 else [],                      # all ranks evaluate
        "one": [30] * 6 if step % every == 0 and rank == 0 else [],        # rank 0 evaluates, the others are in a barrier
    }[mode]
for st in range(40):
    begin = [r.now for r in ranks]
    for r in ranks:
        f = 1.3 if r.rank == 1 and (mode in ("device", "teacher") and st >= 12 or mode.startswith("always")) else 1
        for ms in calls(r.rank, st): r.run_for(FWD, "forward", jitter(rng, ms), st)
        r.run_for(FWD, "forward", jitter(rng, 36 * f), st, 0); r.run_for(BWD, "backward", jitter(rng, 72 * f), st, 0)
    if mode == "one" and st % every == 0: all_reduce(ranks, .1, st, "barrier", 0)
    all_reduce(ranks, 5, st)
    for r, x in zip(ranks, begin): r.run_for(OPT, "optimizer", jitter(rng, 5), st); r.step(st, x, 1024)
for r in ranks: r.close()

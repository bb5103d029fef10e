"""Rank 1 loses 100 ms in every p-th step from step 9 on, in one part of it; arguments: spool, ranks, part, period.

Parts: input, gap (before the forward), forward, backward, launch (before the reduction), optimizer.
A usual step takes 103 ms: data 1, forward 30, backward 60, reduction 5, optimizer 5, gaps 2.
"""
import sys, random
from mk import *
spool, world, part, period = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rng = random.Random(3); ranks = [Rank(spool, part, r, world) for r in range(world)]
for st in range(60):
    b = [r.now for r in ranks]
    def more(r, here): return 100.0 if r.rank == 1 and part == here and st >= 9 and st % period == 1 else 0.0
    for r in ranks:
        r.run_for(DATA, "next batch", jitter(rng, 1.0, .05) + more(r, "input"), st); r.idle(.5 + more(r, "gap"))
        r.run_for(FWD, "forward", jitter(rng, 30) + more(r, "forward"), st, 0); r.idle(.5)
        r.run_for(BWD, "backward", jitter(rng, 60) + more(r, "backward"), st, 0); r.idle(.5 + more(r, "launch"))
    all_reduce(ranks, 5, st)
    for r, x in zip(ranks, b): r.idle(.5); r.run_for(OPT, "optimizer", jitter(rng, 5) + more(r, "optimizer"), st); r.step(st, x, 1024)
for r in ranks: r.close()

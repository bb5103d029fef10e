"""A span of the job's own takes 40 ms, on rank 1 80 ms; arguments: spool, ranks, place (before, inside, after). A usual step takes 140 ms."""
import sys, random
from mk import *
spool, world, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rng = random.Random(4); ranks = [Rank(spool, place, r, world) for r in range(world)]
for st in range(40):
    b = [r.now for r in ranks]
    def own(r, here):
        if here == place: r.run_for(HOST, "retrieval", jitter(rng, 80 if r.rank == 1 else 40), st)
    for r in ranks:
        own(r, "before"); a = r.now; r.idle(1); own(r, "inside"); r.idle(jitter(rng, 30)); r.rec(FWD, "forward", a, r.now, st, 0)
        r.run_for(BWD, "backward", jitter(rng, 60), st, 0); own(r, "after")
    all_reduce(ranks, 5, st)
    for r, x in zip(ranks, b): r.run_for(OPT, "optimizer", jitter(rng, 5), st); r.step(st, x, 1024)
for r in ranks: r.close()

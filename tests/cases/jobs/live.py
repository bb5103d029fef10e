"""A DDP job for torchrun, two ranks, of which rank 1 is at fault; argument: loader, span or recompile.

Steps of 30 ms: rank 1's dataset sleeps 90 ms in every 4th of 32 steps; or a span of the job's own inside the forward
takes 20 ms, on rank 1 40 ms; or rank 1 compiles again in every 4th step from step 12 on.
"""
import sys, time, torch, torch.distributed as dist
from rankscope import tracer
from paced import Paced, loss_of
what = sys.argv[1]; dist.init_process_group("gloo"); slow = dist.get_rank() == 1; torch.manual_seed(0)
class Data(torch.utils.data.Dataset):
    def __len__(s): return 32 * 2
    def __getitem__(s, i):
        if what == "loader" and slow and i % 8 == 0: time.sleep(.09)
        return torch.randint(0, 64, (16,))
class Retrieving(Paced):
    def forward(s, ids):
        if what == "span":
            with tracer.span("retrieval"): time.sleep(.04 if slow else .02)
        return super().forward(ids)
class Compiled(torch.nn.Module):
    def __init__(s): super().__init__(); s.emb = torch.nn.Embedding(64, 64); s.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    def forward(s, ids): return s.layers(s.emb(ids))
model = torch.nn.parallel.DistributedDataParallel(Compiled() if what == "recompile" else Retrieving(.01))
if what == "recompile": torch._dynamo.config.automatic_dynamic_shapes = False; torch._dynamo.config.recompile_limit = 99; model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=.01)
for i, ids in enumerate(torch.utils.data.DataLoader(Data(), batch_size=2)):
    if what == "recompile": ids = torch.randint(0, 64, (2, 17 + i if slow and i >= 12 and i % 4 == 0 else 16)); time.sleep(.01)
    loss_of(model(ids), ids).backward(); optimizer.step(); optimizer.zero_grad()
dist.destroy_process_group()

import torch, time, triton
from quafl.codec.kernels.fused import Triton
from quafl.codec.kernels.oracle import Oracle
o=Oracle(); n=Triton()
dev="cuda"
print(torch.cuda.get_device_name(), triton.__version__)
g=torch.Generator().manual_seed(0)
for d in (5,5000,9*1024-7,300*1024+3):
  for b in (1,3,4,8,14,16):
    x=torch.randn(2,d,generator=g).to(dev); y=x+0.01*torch.randn(d,generator=g).to(dev); seed=torch.randint(2**63-1,(2,),generator=g).to(dev); side=torch.full((2,),0.12/(2**b-1)).to(dev)
    A=o.encode(x,seed,side,b); B=n.encode(x,seed,side,b)
    C=o.encode(x.cpu(),seed.cpu(),side.cpu(),b)
    D=o.decode(A.symbols,A.checks,seed,side,b,y); E=n.decode(A.symbols,A.checks,seed,side,b,y)
    print(d,b,[bool(v) for v in (torch.equal(A.symbols,B.symbols),torch.equal(A.checks,B.checks),torch.equal(A.widest,B.widest),torch.equal(C.symbols,B.symbols.cpu()),torch.equal(D.failed,E.failed),torch.equal(D.vectors,E.vectors), not E.failed.any())], flush=True)
d=200_000_000; b=4
x=torch.randn(1,d,device=dev); y=x+0.01*torch.randn(1,d,device=dev); seed=torch.tensor([987654321987],device=dev); side=torch.tensor([0.12/15],device=dev)
z=torch.empty_like(x)
bench=lambda f: triton.testing.do_bench(f, warmup=20, rep=150, return_mode="median")
cp=bench(lambda: z.copy_(x)); print("copy ms",cp, 8*d/cp/1e9,"TB/s",flush=True)
ref=None
for lanes in (2,4,8,16):
  for warps in (2,4,8,16):
    if lanes*1024/(warps*32)>64 or lanes*1024/(warps*32)<8: continue
    n.encode_tile=n.decode_tile=(lanes,warps)
    t=time.time()
    try:
        A=n.encode(x,seed,side,b); e=bench(lambda: n.encode(x,seed,side,b))
    except Exception as ex: print("enc",lanes,warps,str(ex)[:80]); e=float('nan')
    try:
        D=n.decode(A.symbols,A.checks,seed,side,b,y); dd=bench(lambda: n.decode(A.symbols,A.checks,seed,side,b,y))
        bad=int(D.failed.sum())
    except Exception as ex: print("dec",lanes,warps,str(ex)[:80]); dd=float('nan'); bad=-1
    cp=bench(lambda: z.copy_(x))
    print(f"lanes {lanes} warps {warps}: encode {e/cp:.2f} decode {dd/cp:.2f} failed {bad} compile+run {time.time()-t:.0f}s",flush=True)

import threading, time, os
from shoal.world.agent import current
from support.survivors import live_through
def st(o): return dict(rank=o._engine.rank, awaited=o._awaited, leaving=o._leaving, left=o.left, gone=o._gone, counts=o.counts, uw=o._under_way, call=o._call, ch=o._changed, prod=o._productive, attempt=o._attempt, group=o._group, moving=len(o._moving), broken=o._broken, known=[(k,[(a.committed,a.withdrawn, a.stage.number) for a in v]) for k,v in o._known.items()], due=o.due, begun=o._engine.matcher.begun('~coordination'), inflight=[(str(x), x.waiting_for, x.stage and (x.stage.number, x.stage.posted, x.stage.missing, x.stage.to_move), x.plan, x.recovery and x.recovery.result is not None) for x in o._engine.matcher.in_flight()], ended=o._engine.ended, frozen=o._engine.lifecycle.gate.frozen, plan=o._engine.lifecycle.gate.plan)
def run(numel, rounds, victims):
    o=current().engine.carrier
    def w():
        time.sleep(4)
        with open('/tmp/dbg.log','a') as f: print(st(o), file=f)
        import faulthandler
        with open(f'/tmp/dbg.{o._engine.rank}.log','a') as f: faulthandler.dump_traceback(f)
    threading.Thread(target=w,daemon=True).start()
    return live_through(numel, rounds, victims)

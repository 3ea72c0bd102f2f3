from pathlib import Path
from rank_kit import World
from agent_kit import end_agent, preload
from elastic_case import Case
from tmp_val_case import fit_val
LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
preload("elastic_case")
def test_val(tmp_path: Path) -> None:
    said=[]
    with World(tmp_path, 3, **LAUNCHED) as ranks:
        said.append(ranks.outcome(fit_val, Case(epochs=4), str(tmp_path/"ours"), 7))
        end_agent(ranks.run, "host2"); ranks.hosts=["host0","host1"]
        said.append(ranks.outcome(fit_val, Case(epochs=4), str(tmp_path/"ours"), 14))
        ranks.hosts=["host0","host1","host3"]
        said.append(ranks.outcome(fit_val, Case(epochs=4), str(tmp_path/"ours"), 23))
    for s in said: print([x if isinstance(x,Exception) else (x["start"],x["accumulation"],x["validated"]) for x in s])
    for f in tmp_path.glob("*.stack*"): print(f, f.read_text()[:3000])

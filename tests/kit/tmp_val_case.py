import inspect
import elastic_case
from elastic_case import *
_s = inspect.getsource(elastic_case.fit)
_s = _s.replace("validation = DataLoader(Numbers(), BATCH, shuffle=True)", "validation = DataLoader(Numbers(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)").replace("def fit(", "def fit_val(")
assert "persistent_workers=True)" in _s
import faulthandler
_s = _s.replace('rank, world = int(', 'import faulthandler, sys; faulthandler.dump_traceback_later(45, repeat=True, file=open(f"{out}.stack{os.environ[\'RANK\']}", "a"));  rank, world = int(',1)
exec(_s)

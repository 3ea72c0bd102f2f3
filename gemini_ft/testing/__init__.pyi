# The names that `from gemini_ft.testing import EmulatedHosts` finds: gemini_ft/public_names.py reads this file.
from .hosts import DrillError as DrillError
from .hosts import EmulatedHosts as EmulatedHosts
from .hosts import assert_identical as assert_identical
from .hosts import digest as digest
from .hosts import first_difference as first_difference
from .network import Network as Network
from .network import NetworkError as NetworkError
from .s3_proxy import S3Fault as S3Fault
from .s3_proxy import S3Proxy as S3Proxy
from .s3_proxy import S3Request as S3Request

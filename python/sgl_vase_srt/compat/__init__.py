"""What eviction can be combined with: tables of refusals and of what works, the checks, and their page in the docs."""

from sgl_vase_srt.compat.check import Unsupported, check_environment, check_model, check_request, check_server_args

__all__ = ["Unsupported", "check_environment", "check_model", "check_request", "check_server_args"]

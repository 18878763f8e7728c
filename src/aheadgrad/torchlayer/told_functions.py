"""Functions of torch's that are written in C: which of them give the same in another process.

Functions of tensors do: they are what is recorded. Of the others those do whose answers `process.switches`
tells, and those that change something for a while. The rest (random states, devices, memory) may not.
"""

from __future__ import annotations

import re

import torch

_OF_TENSORS = re.compile(r"torch\._C\.(_nn|_linalg|_fft|_special|_sparse|_nested|_functorch|_autograd)$")
_KINDS = re.compile(
    r"torch\.(Size|dtype|device|finfo|iinfo|layout|memory_format|_C\.(TensorBase|_FunctionBase|"
    r"_EngineBase|_TensorMeta|Node|DisableTorchFunction\w*|_DisableFuncTorch|DispatchKeySet))$"
)
_ADDRESSES = set("data_ptr __hash__ _cdata storage untyped_storage __reduce_ex__".split())
_TOLD = set(
    "_add_docstr _are_functorch_transforms_active _autograd_init _disabled_torch_function_impl "
    "_functionalize_sync _get_cublas_allow_fp16_reduced_precision_reduction _get_cublas_allow_tf32 "
    "_get_cudnn_allow_tf32 _get_cudnn_benchmark _get_cudnn_enabled _get_default_device "
    "_get_deterministic_algorithms _get_deterministic_algorithms_warn_only "
    "_get_float32_matmul_precision _get_function_stack_at _get_mkldnn_enabled _get_operation_overload "
    "_get_privateuse1_backend_name _get_schema _get_tracing_state _has_torch_function "
    "_has_torch_function_unary _has_torch_function_variadic _is_autocast_available "
    "_is_functional_tensor _is_torch_function_all_disabled _is_torch_function_enabled "
    "_is_torch_function_mode_enabled _is_tracing _jit_get_operation _jit_resolve_packet "
    "_len_torch_dispatch_stack _len_torch_function_stack _log_api_usage_once _remove_obj_from_tls "
    "_set_grad_enabled _set_warn_deprecated_on_mutable_data_ptr _should_allow_numbers_as_tensors "
    "_stash_obj_in_tls autocast_decrement_nesting autocast_increment_nesting clear_autocast_cache "
    "get_autocast_dtype get_default_dtype get_num_threads is_anomaly_enabled is_autocast_cache_enabled "
    "is_autocast_enabled is_grad_enabled is_inference_mode_enabled set_autocast_cache_enabled "
    "set_autocast_dtype set_autocast_enabled".split()
)


def unknown_in_torch(holder: str, name: str) -> str:
    """What a function of C is called that may give something else; `holder` is its module or class."""
    if _KINDS.match(holder):
        return f"{holder}.{name}" if name in _ADDRESSES else ""
    if _OF_TENSORS.match(holder) or holder.startswith("torch._ops."):
        return ""
    if re.match(r"\w+Backward\d*$|\w+Accumulate\w*$", holder.rpartition(".")[2]) and "hook" in name:
        return ""
    known = name in _TOLD or (holder == "torch" and hasattr(torch._C._VariableFunctions, name))
    return "" if known else f"{holder}.{name}"

"""From a model's name in a job file to the module."""

import difflib
import importlib
import inspect
import os
import sys
from typing import Any

from torch import nn

from hpc_ctr.errors import UsageError
from hpc_ctr.models.deepfm import DeepFm
from hpc_ctr.models.dlrm import Dlrm
from hpc_ctr.models.dnn import Dnn
from hpc_ctr.models.lr import LogisticRegression
from hpc_ctr.models.spec import ModelSpec

MODELS: dict[str, type[nn.Module]] = {"lr": LogisticRegression, "deepfm": DeepFm, "dlrm": Dlrm, "dnn": Dnn}


def resolve(name: str) -> type[nn.Module]:
    """The class behind the name of a model.

    name: a key of MODELS, ``package.module:Class`` or ``package.module.Class``; modules are looked for in the
    current folder too. Raises UsageError.
    """
    if name in MODELS:
        return MODELS[name]
    if not isinstance(name, str) or not ("." in name or ":" in name):
        near = difflib.get_close_matches(str(name), MODELS, 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"model.name: unknown model {name!r}; {hint}known are {', '.join(sorted(MODELS))}, "
                         "or your own torch module as package.module:Class")
    module_name, _, class_name = name.partition(":") if ":" in name else name.rpartition(".")
    module = _import(name, module_name)
    cls = getattr(module, class_name, None)
    if cls is None:
        near = difflib.get_close_matches(class_name, dir(module), 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"model.name: module {module_name} has no {class_name or 'class name given'}{hint}")
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise UsageError(f"model.name: {name} is not a torch.nn.Module class")
    return cls


def needs_first_order(name: str) -> bool:
    """Whether the model takes first-order weights: class attribute ``first_order``, by default False."""
    return bool(getattr(resolve(name), "first_order", False))


def wants_vectors(name: str) -> bool:
    """Whether the model takes embedding vectors: class attribute ``wants_vectors``, by default True."""
    return bool(getattr(resolve(name), "wants_vectors", True))


def build(name: str, spec: ModelSpec, options: dict[str, Any] | None = None) -> nn.Module:
    """The model ``name`` as a module in ``spec.dtype``, its parameters drawn from torch's default generator.

    Its ``forward(dense [B, D], vectors: one [B, F_t, dim_t] a table, first [B, F] or None)`` gives logits
    [B]. options: keyword arguments of the class. Raises UsageError naming ``model.<option>`` for one that is
    not known.
    """
    cls = resolve(name)
    options = dict(options or {})
    _check_options(name, cls, options)
    model = cls(spec, **options)
    for parameter, value in model.named_parameters():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise UsageError(f"model.name: parameter {parameter} of {name} has no shape yet; a lazy module cannot be "
                             "used, since its parameters are made before there is data: give the sizes")
    return model.to(spec.dtype)


def option_names(name: str) -> list[str]:
    """The options that the model takes, in the order of its constructor."""
    parameters = list(inspect.signature(resolve(name).__init__).parameters.values())[2:]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _check_options(name: str, cls: type[nn.Module], options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(cls.__init__).parameters.values())
    if len(parameters) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UsageError(f"model.name: the constructor of {name} takes nothing; it must take the ModelSpec first: "
                         "def __init__(self, spec)")
    parameters = parameters[2:]
    known = option_names(name)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option in known:
                continue
            near = difflib.get_close_matches(str(option), known, 1, 0.5)
            hint = (f"did you mean model.{near[0]}?" if near
                    else f"it takes {', '.join('model.' + other for other in known) or 'none'}")
            raise UsageError(f"model.{option}: model {name} has no such option; {hint}")
    for p in parameters:
        required = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if required and p.name not in options:
            raise UsageError(f"model.{p.name}: model {name} needs this option")


def _import(name: str, module_name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # an installed console script does not look where the user stands
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise UsageError(f"model.name: {name} cannot be imported: {type(error).__name__}: {text}") from error

"""Loads a module of the product in a pure test: what imports vLLM or Mooncake is a stand-in meanwhile."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType


def loaded_with(module: str, stand_ins: Mapping[str, Mapping[str, object]]) -> ModuleType:
    """Returns the module. `stand_ins`: the fields of each stand-in by its name. Other tests import the real ones."""
    names = *stand_ins, module
    former = {name: sys.modules.pop(name, None) for name in names}
    packages = {name: vars(sys.modules.get(name.rpartition(".")[0], ModuleType(name))) for name in names}
    attributes = {name: packages[name].pop(name.rpartition(".")[2], None) for name in names}
    for name, fields in stand_ins.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(fields)
    try:
        return importlib.import_module(module)
    finally:
        for name in names:
            sys.modules.pop(name, None)
            packages[name].pop(name.rpartition(".")[2], None)
            if former[name] is not None:
                sys.modules[name] = former[name]
            if attributes[name] is not None:
                packages[name][name.rpartition(".")[2]] = attributes[name]

// Shared by the files that bind the core to Python.
#pragma once
#include <pybind11/pybind11.h>

#include <optional>

#include "calls.h"
#include "dtype.h"
#include "torch_shim.h"

namespace pyengine {

using Address = uintptr_t;
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

inline std::optional<DType> dtype_of_scalar_type(int32_t scalar_type) {
  switch (scalar_type) {  // c10::ScalarType, fixed by torch's serialization format
    case 6: return DType::f32;
    case 15: return DType::bf16;
    case 5: return DType::fp16;
    default: return std::nullopt;
  }
}

// Whether an op may read the object's elements at its address; subclasses may store them elsewhere.
inline bool is_plain(PyObject* object, const pybind11::tuple& exact_types, TensorFacts* facts) {
  bool exact = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(exact_types.ptr()); ++i)
    exact |= reinterpret_cast<PyObject*>(Py_TYPE(object)) == PyTuple_GET_ITEM(exact_types.ptr(), i);
  return exact && tensor_facts(object, facts);
}

// The facts of a tensor on the host; nullopt where Python has to check it.
inline std::optional<TensorFacts> facts_on_host(PyObject* object, const pybind11::tuple& exact_types) {
  TensorFacts facts;
  if (!is_plain(object, exact_types, &facts) || facts.device_type != kCpu) return std::nullopt;
  return facts;
}

void bind_audit(pybind11::module_& m);
void bind_shared(pybind11::module_& m);

}  // namespace pyengine

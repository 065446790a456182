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

// The tuple (Tensor, Parameter) of the types that store their elements at their address; subclasses may store
// them elsewhere. Set by learn_tensor_object and never freed.
inline PyObject* plain_types = nullptr;

// Whether an op may read the object's elements at its address.
inline bool is_plain(PyObject* object, TensorFacts* facts) {
  bool exact = false;
  for (Py_ssize_t i = 0; plain_types && i < PyTuple_GET_SIZE(plain_types); ++i)
    exact |= reinterpret_cast<PyObject*>(Py_TYPE(object)) == PyTuple_GET_ITEM(plain_types, i);
  return exact && tensor_facts(object, facts);
}

// Metadata of a tensor on the host; nullopt if Python has to check the tensor.
inline std::optional<TensorFacts> facts_on_host(PyObject* object) {
  TensorFacts facts;
  if (!is_plain(object, &facts) || facts.device_type != kCpu) return std::nullopt;
  return facts;
}

void bind_audit(pybind11::module_& m);
void bind_shared(pybind11::module_& m);

}  // namespace pyengine

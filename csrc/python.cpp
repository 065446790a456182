// The one pybind11 file: pointers and sizes in, never tensors. Checks stand in pyengine/_ops.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "cpu/dispatch.h"
#include "plan.h"
#include "torch_shim.h"

namespace py = pybind11;
using namespace pyengine;

namespace {

using Address = uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

// The addresses of one list of tensors; the Python Pointers that owns this keeps the tensors alive.
struct Table {
  std::vector<void*> data;
  DType dtype;
  Tensors view() const { return {data.data(), dtype}; }
};

Table make_table(const std::vector<Address>& addresses, int dtype) {
  Table table{{}, static_cast<DType>(dtype)};
  for (Address address : addresses) table.data.push_back(at<void>(address));
  return table;
}

int dtype_of_scalar_type(int32_t scalar_type) {
  switch (scalar_type) {  // c10::ScalarType, fixed by torch's serialization format
    case 6: return static_cast<int>(DType::f32);
    case 15: return static_cast<int>(DType::bf16);
    case 5: return static_cast<int>(DType::fp16);
    default: return -1;
  }
}

// The addresses of a list of plain tensors, about 30 ns each where attribute calls from Python take 400.
// None when anything needs a closer look; Python then checks one by one and writes the message.
std::optional<Table> gather(const BucketPlan& plan, py::list tensors, py::tuple exact_types) {
  const size_t n = plan.numels().size();
  if (tensors.size() != n) return std::nullopt;
  Table table{std::vector<void*>(n), DType::f32};
  int dtype = -1;
  for (size_t i = 0; i < n; ++i) {
    PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (object == Py_None) continue;
    bool plain = false;
    for (auto type : exact_types) plain |= reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
    TensorFacts facts;
    if (!plain || !tensor_facts(object, &facts) || facts.numel != plan.numels()[i]) return std::nullopt;
    const int this_dtype = dtype_of_scalar_type(facts.scalar_type);
    if (this_dtype < 0 || (dtype >= 0 && dtype != this_dtype)) return std::nullopt;
    dtype = this_dtype;
    table.data[i] = facts.data;
  }
  if (dtype >= 0) table.dtype = static_cast<DType>(dtype);
  return table;
}

void unscale_norm(const BucketPlan& plan, const Table& tensors, const Table* out, Address scale, Address sumsq,
                  Address nonfinite) {
  const Layout layout = plan.layout();
  std::vector<double> partials(static_cast<size_t>(2 * layout.num_chunks));
  ops().unscale_norm(layout, {tensors.view(), out ? out->view() : Tensors{nullptr, DType::f32}, at<float>(scale),
                              partials.data(), at<double>(sumsq), at<uint8_t>(nonfinite)});
}

void bind_roofs(py::module_& m) {
  m.def("roof_read", [](Address src, int64_t n) { return ops().roof_read(at<float>(src), n); }, NoGil());
  m.def("roof_update", [](Address dst, int64_t n) { ops().roof_update(at<float>(dst), n); }, NoGil());
  m.def("roof_stream_copy", [](Address dst, Address src, int64_t n) {
    ops().roof_stream_copy(at<float>(dst), at<float>(src), n);
  }, NoGil());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.def("isa", [] { return ops().isa; });
  m.def("set_isa", &set_isa);
  m.def("thread_pool", &thread_pool);
  m.def("learn_tensor_object", [](py::handle tensor, Address cdata) {
    return learn_tensor_object(tensor.ptr(), at<void>(cdata));
  });
  m.def("gather", &gather);
  m.attr("BLOCK_ELEMENTS") = kBlockElements;

  py::class_<Table>(m, "Table")
      .def(py::init(&make_table))
      .def_property_readonly("dtype", [](const Table& table) { return static_cast<int>(table.dtype); });

  py::class_<BucketPlan>(m, "BucketPlan")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>>())
      .def("pack_", [](const BucketPlan& plan, Address flat, int dtype, const Table& tensors, Address scale) {
        ops().pack(plan.layout(), {at<void>(flat), static_cast<DType>(dtype)}, tensors.view(), at<float>(scale));
      }, NoGil())
      .def("unpack_", [](const BucketPlan& plan, const Table& tensors, Address flat, int dtype, Address scale) {
        ops().unpack(plan.layout(), tensors.view(), {at<void>(flat), static_cast<DType>(dtype)}, at<float>(scale));
      }, NoGil())
      .def("accumulate_", [](const BucketPlan& plan, Address acc, const Table& grads, Address scale, bool first,
                             Address nonfinite) {
        ops().accumulate(plan.layout(), {at<float>(acc), grads.view(), at<float>(scale), first,
                                         at<uint8_t>(nonfinite)});
      }, NoGil())
      .def("accumulate_cast_", [](const BucketPlan& plan, Address wire, int dtype, Address acc, const Table& grads,
                                  Address grad_scale, Address wire_scale, bool first, Address nonfinite) {
        ops().accumulate_cast(plan.layout(), {{at<void>(wire), static_cast<DType>(dtype)}, at<float>(acc),
                                              grads.view(), at<float>(grad_scale), at<float>(wire_scale), first,
                                              at<uint8_t>(nonfinite)});
      }, NoGil())
      .def("unscale_norm", &unscale_norm, NoGil());

  bind_roofs(m);
}

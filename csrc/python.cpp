// The one pybind11 file: pointers and sizes in, never tensors. Checks stand in pyengine/_ops.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "plan.h"
#include "torch_shim.h"
#ifdef PYENGINE_CUDA
#include "cuda/ops.h"
#endif

#ifndef PYENGINE_MODULE
#define PYENGINE_MODULE _core
#endif

namespace py = pybind11;
using namespace pyengine;

namespace {

using Address = uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

using Device = std::pair<int32_t, int32_t>;  // c10::DeviceType and index

// The addresses of one list of tensors; the Python Pointers that owns this keeps the tensors alive.
struct Table {
  std::vector<void*> data;
  DType dtype = DType::f32;
  Device device{-1, -1};             // told by gather; -1: no slot has a tensor
  void* const* on_device = nullptr;  // a copy in CUDA memory, owned by Python too
  Tensors view() const { return {data.data(), dtype, on_device}; }
};

Table make_table(const std::vector<Address>& addresses, int dtype) {
  Table table;
  table.dtype = static_cast<DType>(dtype);
  for (Address address : addresses) table.data.push_back(at<void>(address));
  return table;
}

std::optional<DType> dtype_of_scalar_type(int32_t scalar_type) {
  switch (scalar_type) {  // c10::ScalarType, fixed by torch's serialization format
    case 6: return DType::f32;
    case 15: return DType::bf16;
    case 5: return DType::fp16;
    default: return std::nullopt;
  }
}

// The addresses of a list of plain tensors, about 30 ns each where attribute calls from Python take 400.
// None when anything needs a closer look; Python then checks one by one and writes the message.
std::optional<Table> gather(const BucketPlan& plan, py::list tensors, py::tuple exact_types) {
  const size_t n = plan.numels().size();
  if (tensors.size() != n) return std::nullopt;
  Table table;
  table.data.resize(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (object == Py_None) continue;
    bool plain = false;
    for (auto type : exact_types) plain |= reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
    TensorFacts facts;
    if (!plain || !tensor_facts(object, &facts) || facts.numel != plan.numels()[i]) return std::nullopt;
    const std::optional<DType> dtype = dtype_of_scalar_type(facts.scalar_type);
    const Device device{facts.device_type, facts.device_index};
    const bool is_first = table.device.first < 0;
    if (!dtype || (!is_first && (table.dtype != *dtype || table.device != device))) return std::nullopt;
    table.dtype = *dtype;
    table.device = device;
    table.data[i] = facts.data;
  }
  return table;
}

// ---- calls: the same on the CPU and on CUDA ----

Flat flat_at(Address flat, int dtype) { return {at<void>(flat), static_cast<DType>(dtype)}; }

AccumulateCall accumulate_call(Address acc, const Table& grads, Address scale, bool first, Address nonfinite) {
  return {at<float>(acc), grads.view(), at<float>(scale), first, at<uint8_t>(nonfinite)};
}

AccumulateCastCall accumulate_cast_call(Address wire, int dtype, Address acc, const Table& grads, Address grad_scale,
                                        Address wire_scale, bool first, Address nonfinite) {
  return {flat_at(wire, dtype), at<float>(acc), grads.view(), at<float>(grad_scale), at<float>(wire_scale), first,
          at<uint8_t>(nonfinite)};
}

UnscaleNormCall unscale_norm_call(const Table& tensors, const Table* out, Address scale, double* partials,
                                  Address sumsq, Address nonfinite) {
  return {tensors.view(), out ? out->view() : Tensors{nullptr, DType::f32}, at<float>(scale), partials,
          at<double>(sumsq), at<uint8_t>(nonfinite)};
}

ExactSum exact_sum(Address hi, Address lo, Address bins, int64_t num_blocks, int width) {
  return {at<int32_t>(hi), at<int32_t>(lo), at<uint8_t>(bins), num_blocks, width};
}

DepositCall deposit_call(const ExactSum& sum, const Table& terms, bool first, Address nonfinite) {
  return {sum, terms.view(), first, at<uint8_t>(nonfinite)};
}

// ---- CPU ----

void unscale_norm(const BucketPlan& plan, const Table& tensors, const Table* out, Address scale, Address sumsq,
                  Address nonfinite) {
  const Layout layout = plan.layout();
  std::vector<double> partials(static_cast<size_t>(2 * layout.num_chunks));
  ops().unscale_norm(layout, unscale_norm_call(tensors, out, scale, partials.data(), sumsq, nonfinite));
}

void bind_plan(py::module_& m) {
  py::class_<BucketPlan>(m, "BucketPlan", py::module_local())
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>>())
      .def_property_readonly("num_words", &BucketPlan::num_words)
      .def("write_words", [](const BucketPlan& plan, Address words) { plan.write_words(at<int64_t>(words)); })
      .def("pack_", [](const BucketPlan& plan, Address flat, int dtype, const Table& tensors, Address scale) {
        ops().pack(plan.layout(), flat_at(flat, dtype), tensors.view(), at<float>(scale));
      }, NoGil())
      .def("unpack_", [](const BucketPlan& plan, const Table& tensors, Address flat, int dtype, Address scale) {
        ops().unpack(plan.layout(), tensors.view(), flat_at(flat, dtype), at<float>(scale));
      }, NoGil())
      .def("accumulate_", [](const BucketPlan& plan, Address acc, const Table& grads, Address scale, bool first,
                             Address nonfinite) {
        ops().accumulate(plan.layout(), accumulate_call(acc, grads, scale, first, nonfinite));
      }, NoGil())
      .def("accumulate_cast_", [](const BucketPlan& plan, Address wire, int dtype, Address acc, const Table& grads,
                                  Address grad_scale, Address wire_scale, bool first, Address nonfinite) {
        ops().accumulate_cast(plan.layout(), accumulate_cast_call(wire, dtype, acc, grads, grad_scale, wire_scale,
                                                                  first, nonfinite));
      }, NoGil())
      .def("unscale_norm", &unscale_norm, NoGil())
      .def("exact_deposit_", [](const BucketPlan& plan, const ExactSum& sum, const Table& terms, bool first,
                                Address nonfinite) {
        ops().exact_deposit(plan.layout(), deposit_call(sum, terms, first, nonfinite));
      }, NoGil())
      .def("exact_align_", [](const BucketPlan&, const ExactSum& sum, Address bins) {
        ops().exact_align({sum, at<uint8_t>(bins)});
      }, NoGil())
      .def("exact_round_", [](const BucketPlan&, const ExactSum& sum, Address out, int dtype) {
        ops().exact_round({sum, flat_at(out, dtype)});
      }, NoGil());
}

void bind_roofs(py::module_& m) {
  m.def("roof_read", [](Address src, int64_t n) { return ops().roof_read(at<float>(src), n); }, NoGil());
  m.def("roof_update", [](Address dst, int64_t n) { ops().roof_update(at<float>(dst), n); }, NoGil());
  m.def("roof_stream_copy", [](Address dst, Address src, int64_t n) {
    ops().roof_stream_copy(at<float>(dst), at<float>(src), n);
  }, NoGil());
}

// ---- CUDA: a plan whose words lie on a device. Every address is there; Python owns all of it ----

#ifdef PYENGINE_CUDA

struct CudaPlan {
  Layout layout;
  // Scratch of unscale_norm: two doubles a chunk, then a ticket a slot. Zero before the first call.
  int64_t scratch_bytes() const { return 16 * layout.num_chunks + 4 * layout.num_slots; }
};

Table uploaded(const Table& table, Address on_device, Address stream) {
  upload_cuda(at<void*>(on_device), table.data.data(), static_cast<int64_t>(table.data.size()), at<void>(stream));
  Table copy = table;
  copy.on_device = at<void*>(on_device);
  return copy;
}

void unscale_norm_on(const CudaPlan& plan, Address stream, Address scratch, const Table& tensors, const Table* out,
                     Address scale, Address sumsq, Address nonfinite) {
  double* partials = at<double>(scratch);
  UnscaleNormCall call = unscale_norm_call(tensors, out, scale, partials, sumsq, nonfinite);
  call.tickets = reinterpret_cast<uint32_t*>(partials + 2 * plan.layout.num_chunks);
  unscale_norm_cuda(plan.layout, at<void>(stream), call);
}

void bind_cuda(py::module_& m) {
  m.attr("INLINE_SLOTS") = kInlineSlots;
  m.def("uploaded", &uploaded);
  py::class_<CudaPlan>(m, "CudaPlan", py::module_local())
      .def(py::init([](const BucketPlan& plan, Address words) { return CudaPlan{plan.layout_at(at<int64_t>(words))}; }))
      .def_property_readonly("scratch_bytes", &CudaPlan::scratch_bytes)
      .def("pack_", [](const CudaPlan& plan, Address stream, Address flat, int dtype, const Table& tensors,
                       Address scale) {
        pack_cuda(plan.layout, at<void>(stream), flat_at(flat, dtype), tensors.view(), at<float>(scale));
      }, NoGil())
      .def("unpack_", [](const CudaPlan& plan, Address stream, const Table& tensors, Address flat, int dtype,
                         Address scale) {
        unpack_cuda(plan.layout, at<void>(stream), tensors.view(), flat_at(flat, dtype), at<float>(scale));
      }, NoGil())
      .def("accumulate_", [](const CudaPlan& plan, Address stream, Address acc, const Table& grads, Address scale,
                             bool first, Address nonfinite) {
        accumulate_cuda(plan.layout, at<void>(stream), accumulate_call(acc, grads, scale, first, nonfinite));
      }, NoGil())
      .def("accumulate_cast_", [](const CudaPlan& plan, Address stream, Address wire, int dtype, Address acc,
                                  const Table& grads, Address grad_scale, Address wire_scale, bool first,
                                  Address nonfinite) {
        accumulate_cast_cuda(plan.layout, at<void>(stream),
                             accumulate_cast_call(wire, dtype, acc, grads, grad_scale, wire_scale, first, nonfinite));
      }, NoGil())
      .def("unscale_norm", &unscale_norm_on, NoGil())
      .def("exact_deposit_", [](const CudaPlan& plan, Address stream, const ExactSum& sum, const Table& terms,
                                bool first, Address nonfinite) {
        exact_deposit_cuda(plan.layout, at<void>(stream), deposit_call(sum, terms, first, nonfinite));
      }, NoGil())
      .def("exact_align_", [](const CudaPlan&, Address stream, const ExactSum& sum, Address bins) {
        exact_align_cuda(at<void>(stream), {sum, at<uint8_t>(bins)});
      }, NoGil())
      .def("exact_round_", [](const CudaPlan&, Address stream, const ExactSum& sum, Address out, int dtype) {
        exact_round_cuda(at<void>(stream), {sum, flat_at(out, dtype)});
      }, NoGil());
}

#endif

}  // namespace

PYBIND11_MODULE(PYENGINE_MODULE, m) {
  m.def("isa", [] { return ops().isa; });
  m.def("set_isa", &set_isa);
  m.def("thread_pool", &thread_pool);
  m.def("learn_tensor_object", [](py::handle tensor, Address cdata) {
    return learn_tensor_object(tensor.ptr(), at<void>(cdata));
  });
  m.def("gather", &gather);
  m.attr("BLOCK_ELEMENTS") = kBlockElements;

  py::class_<Table>(m, "Table", py::module_local())
      .def(py::init(&make_table))
      .def_property_readonly("dtype", [](const Table& table) { return static_cast<int>(table.dtype); })
      .def_readonly("device", &Table::device);

  m.attr("EXACT_BLOCK") = kExactBlock;
  py::class_<ExactSum>(m, "ExactSum", py::module_local()).def(py::init(&exact_sum));

  bind_plan(m);
  bind_roofs(m);
#ifdef PYENGINE_CUDA
  bind_cuda(m);
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}

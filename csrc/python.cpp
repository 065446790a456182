// Binds the ops. Their arguments are pointers and sizes, never tensors; pyengine/ops/plan.py checks them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "cuda/ops.h"
#include "overlap.h"
#include "plan.h"
#include "python.h"

#ifndef PYENGINE_MODULE
#define PYENGINE_MODULE _core
#endif

namespace py = pybind11;
using namespace pyengine;

namespace {

using Device = std::pair<int32_t, int32_t>;  // c10::DeviceType and index

// The addresses of a list of tensors. The Python `Pointers` object that owns this table keeps the tensors
// alive.
struct Table {
  std::vector<void*> data;
  DType dtype = DType::f32;
  Device device{-1, -1};             // set by gather; -1: no slot has a tensor
  void* const* on_device = nullptr;  // a copy in CUDA memory, also owned by Python
  std::optional<std::vector<Span>> spans = std::nullopt;  // computed on first use
  Tensors view() const { return {data.data(), dtype, on_device}; }
  const std::vector<Span>& sorted(const BucketPlan& plan) {
    if (!spans) spans = sorted_spans(plan, view());
    return *spans;
  }
};

DType checked(int code) {
  if (code < static_cast<int>(DType::f32) || code > static_cast<int>(DType::fp16))
    throw std::invalid_argument("dtype code " + std::to_string(code) + "; expected 0 (float32), 1 (bfloat16) or 2 (float16)");
  return static_cast<DType>(code);
}

Table make_table(const std::vector<Address>& addresses, int dtype) {
  Table table;
  table.dtype = checked(dtype);
  for (Address address : addresses) table.data.push_back(at<void>(address));
  return table;
}

// Collects the addresses of a list of plain tensors in about 30 ns per tensor; attribute access from Python
// would take 400 ns. Returns None if Python has to check the tensors one by one and write the error message.
std::optional<Table> gather(const BucketPlan& plan, const py::list& tensors) {
  const size_t n = plan.numels().size();
  if (tensors.size() != n) return std::nullopt;
  Table table;
  table.data.resize(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (object == Py_None) continue;
    TensorFacts facts;
    if (!is_plain(object, &facts) || facts.numel != plan.numels()[i]) return std::nullopt;
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

// The first slot whose tensor no longer has the slot's numel, or the memory that the table points to; -1 if there
// is none.
int64_t first_moved(const BucketPlan& plan, const Table& table, const py::list& tensors) {
  const int64_t size = element_bytes(table.dtype);
  for (size_t i = 0; i < table.data.size(); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    const int64_t numel = plan.numels()[i];
    if (object == Py_None) continue;
    if (!has_numel(object, numel) || (table.data[i] && !is_at(object, table.data[i], numel, size)))
      return static_cast<int64_t>(i);
  }
  return -1;
}

// ---- an op in both plans ----

// The ops of csrc/cuda, like `Ops` for csrc/cpu; null in a build without CUDA.
struct CudaOps {
#define PYENGINE_OP(op, Call) void (*op)(const DeviceLayout& layout, void* stream, const Call& call);
  PYENGINE_OPS(PYENGINE_OP)
#undef PYENGINE_OP
  decltype(&upload_cuda) upload;
  decltype(&load_kernels_cuda) load_kernels;
};
#ifdef PYENGINE_CUDA
constexpr bool kHasCuda = true;
#define PYENGINE_OP(op, Call) op##_cuda,
constexpr CudaOps kCudaOps{PYENGINE_OPS(PYENGINE_OP) upload_cuda, load_kernels_cuda};
#undef PYENGINE_OP
#else
constexpr bool kHasCuda = false;
constexpr CudaOps kCudaOps{};
#endif

// A plan on a CUDA device. All of its addresses are in device memory, which Python owns.
struct CudaPlan {
  DeviceLayout layout;
  // Size of unscale_norm's scratch: two doubles per chunk, then one ticket per slot. Must be zero before
  // the first call.
  int64_t scratch_bytes() const { return 16 * layout.num_chunks + 4 * layout.num_slots; }
};

struct Plans {
  py::class_<BucketPlan> cpu;
  std::optional<py::class_<CudaPlan>> cuda = std::nullopt;
};

// Defines an op as a method of both plans. Its arguments are those of `make`, which builds the op's call; on
// CUDA, the stream (a cudaStream_t) comes first.
template <class Call, class... Args>
void def_op(Plans& plans, const char* name, void (*Ops::*on_cpu)(const Layout&, const Call&),
            void (*on_cuda)(const DeviceLayout&, void*, const Call&), Call (*make)(Args...)) {
  plans.cpu.def(name, [=](const BucketPlan& plan, Args... args) {
    (ops().*on_cpu)(plan.layout(), make(args...));
  }, NoGil());
  if (!plans.cuda) return;
  plans.cuda->def(name, [=](const CudaPlan& plan, Address stream, Args... args) {
    on_cuda(plan.layout, at<void>(stream), make(args...));
  }, NoGil());
}

// ---- ops ----

Flat flat_at(Address flat, int dtype) { return {at<void>(flat), checked(dtype)}; }

PackCall pack_call(Address flat, int dtype, const Table& tensors, Address scale, Address only_if) {
  return {flat_at(flat, dtype), tensors.view(), at<float>(scale), at<float>(only_if)};
}

void bind_pack(Plans& plans) {
  def_op(plans, "pack_", &Ops::pack, kCudaOps.pack, pack_call);
  def_op(plans, "unpack_", &Ops::unpack, kCudaOps.unpack, pack_call);
}

AccumulateCall accumulate_call(Address acc, const Table& grads, Address scale, bool first, Address nonfinite) {
  return {at<float>(acc), grads.view(), at<float>(scale), first, at<uint8_t>(nonfinite)};
}

AccumulateCastCall accumulate_cast_call(Address wire, int dtype, Address acc, const Table& grads, Address grad_scale,
                                        Address wire_scale, bool first, Address nonfinite) {
  return {flat_at(wire, dtype), at<float>(acc), grads.view(), at<float>(grad_scale), at<float>(wire_scale), first,
          at<uint8_t>(nonfinite)};
}

void bind_accumulate(Plans& plans) {
  def_op(plans, "accumulate_", &Ops::accumulate, kCudaOps.accumulate, accumulate_call);
  def_op(plans, "accumulate_cast_", &Ops::accumulate_cast, kCudaOps.accumulate_cast, accumulate_cast_call);
}

UnscaleNormCall unscale_norm_call(const Table& tensors, const Table* out, Address scale, double* partials,
                                  Address sumsq, Address nonfinite) {
  return {tensors.view(), out ? out->view() : Tensors{nullptr, DType::f32}, at<float>(scale), partials,
          at<double>(sumsq), at<uint8_t>(nonfinite)};
}

// Does not use def_op, because the op needs scratch memory: for the CPU it is allocated here, and for CUDA by
// Python.
void bind_unscale_norm(Plans& plans) {
  plans.cpu.def("unscale_norm", [](const BucketPlan& plan, const Table& tensors, const Table* out, Address scale,
                                   Address sumsq, Address nonfinite) {
    const Layout layout = plan.layout();
    std::vector<double> partials(static_cast<size_t>(2 * layout.num_chunks));
    ops().unscale_norm(layout, unscale_norm_call(tensors, out, scale, partials.data(), sumsq, nonfinite));
  }, NoGil());
  if (!plans.cuda) return;
  plans.cuda->def("unscale_norm", [](const CudaPlan& plan, Address stream, Address scratch, const Table& tensors,
                                     const Table* out, Address scale, Address sumsq, Address nonfinite) {
    double* partials = at<double>(scratch);
    UnscaleNormCall call = unscale_norm_call(tensors, out, scale, partials, sumsq, nonfinite);
    call.tickets = reinterpret_cast<uint32_t*>(partials + 2 * plan.layout.num_chunks);
    kCudaOps.unscale_norm(plan.layout, at<void>(stream), call);
  }, NoGil());
}

ExactSum exact_sum(Address hi, Address lo, Address bins, int64_t num_blocks, int width) {
  return {at<int32_t>(hi), at<int32_t>(lo), at<uint8_t>(bins), num_blocks, width};
}

DepositCall deposit_call(const ExactSum& sum, const Table& terms, bool first, Address nonfinite) {
  return {sum, terms.view(), first, at<uint8_t>(nonfinite)};
}

AlignCall align_call(const ExactSum& sum, Address bins) { return {sum, at<uint8_t>(bins)}; }

RoundCall round_call(const ExactSum& sum, Address out, int dtype) { return {sum, flat_at(out, dtype)}; }

void bind_exact(py::module_& m, Plans& plans) {
  py::class_<ExactSum>(m, "ExactSum", py::module_local()).def(py::init(&exact_sum));
  def_op(plans, "exact_deposit_", &Ops::exact_deposit, kCudaOps.exact_deposit, deposit_call);
  def_op(plans, "exact_align_", &Ops::exact_align, kCudaOps.exact_align, align_call);
  def_op(plans, "exact_round_", &Ops::exact_round, kCudaOps.exact_round, round_call);
}

Codec codec_of(int format, int64_t block, int64_t numel) {
  const bool has_scales = block > 1;
  return {static_cast<ValueFormat>(format), block, numel, has_scales ? (numel + block - 1) / block : 0};
}

// Without a key, rounding is to nearest.
using Key = std::optional<std::pair<uint32_t, uint32_t>>;

Chance chance_of(const Key& key, int64_t offset) {
  if (!key) return {};
  return {true, {key->first, key->second}, static_cast<uint32_t>(offset)};  // the index wraps around
}

EncodeCall encode_call(const Codec& codec, Address payload, Address values, Address residual, const Key& key,
                       int64_t offset) {
  return {codec, at<uint8_t>(payload), at<float>(values), at<float>(residual), chance_of(key, offset)};
}

// `shape` is the number of payloads and the distance between them in bytes.
SumEncodeCall sum_encode_call(const Codec& codec, Address out, Address payloads, std::pair<int64_t, int64_t> shape,
                              Address residual, const Key& key, int64_t offset) {
  return {codec, at<uint8_t>(out), {at<uint8_t>(payloads), shape.first, shape.second}, at<float>(residual),
          chance_of(key, offset)};
}

SumCall sum_call(const Codec& codec, Address out, int dtype, Address payloads, std::pair<int64_t, int64_t> shape) {
  return {codec, flat_at(out, dtype), {at<uint8_t>(payloads), shape.first, shape.second}};
}

// Like def_op, for an op without a layout.
template <class Call, class... Args>
void def_function(py::module_& m, const std::string& name, void (*Ops::*on_cpu)(const Layout&, const Call&),
                  void (*on_cuda)(const DeviceLayout&, void*, const Call&), Call (*make)(Args...)) {
  m.def(name.c_str(), [=](Args... args) { (ops().*on_cpu)({}, make(args...)); }, NoGil());
  if (!kHasCuda) return;
  m.def((name + "_cuda").c_str(), [=](Address stream, Args... args) { on_cuda({}, at<void>(stream), make(args...)); },
        NoGil());
}

void bind_codec(py::module_& m) {
  py::class_<Codec>(m, "Codec", py::module_local()).def(py::init(&codec_of));
  def_function(m, "codec_encode", &Ops::codec_encode, kCudaOps.codec_encode, encode_call);
  def_function(m, "codec_sum_encode", &Ops::codec_sum_encode, kCudaOps.codec_sum_encode, sum_encode_call);
  def_function(m, "codec_sum", &Ops::codec_sum, kCudaOps.codec_sum, sum_call);
}

// ---- other functions ----

Table uploaded(const Table& table, Address on_device, Address stream) {
  kCudaOps.upload(at<void*>(on_device), table.data.data(), static_cast<int64_t>(table.data.size()), at<void>(stream));
  Table copy = table;
  copy.on_device = at<void*>(on_device);
  return copy;
}

void bind_torch(py::module_& m) {
  m.def("thread_pool", &thread_pool);
  m.def("learn_tensor_object", [](py::handle object, Address tensor, Address storage, uint64_t keys,
                                  int64_t storage_offset, Address data, int64_t bytes, uint64_t plain_keys,
                                  const py::tuple& types) {
    plain_types = types.inc_ref().ptr();
    const Probe probe{at<void>(tensor), at<void>(storage), keys, storage_offset, at<void>(data), bytes};
    return learn_tensor_object(object.ptr(), probe, plain_keys);
  });
  m.def("is_plain", [](py::handle tensor) {
    TensorFacts facts;
    return is_plain(tensor.ptr(), &facts);
  });
}

void bind_table(py::module_& m) {
  m.def("gather", &gather);
  py::class_<Table>(m, "Table", py::module_local())
      .def(py::init(&make_table))
      .def_property_readonly("dtype", [](const Table& table) { return static_cast<int>(table.dtype); })
      .def_readonly("device", &Table::device);
  if (!kHasCuda) return;
  m.attr("INLINE_SLOTS") = kInlineSlots;
  m.attr("MOST_INLINE_SLOTS") = kMostInlineSlots;
  m.def("load_kernels", kCudaOps.load_kernels);
  m.def("uploaded", &uploaded);
}

void bind_plan(Plans& plans) {
  plans.cpu.def(py::init<std::vector<int64_t>, std::vector<int64_t>>())
      .def("first_moved", &first_moved)
      .def_property_readonly("num_words", &BucketPlan::num_words)
      .def("write_words", [](const BucketPlan& plan, Address words) { plan.write_words(at<int64_t>(words)); });
  if (!plans.cuda) return;
  plans.cuda->def(py::init([](const BucketPlan& plan, Address words) {
    return CudaPlan{plan.layout_at(at<int64_t>(words))};
  }));
  plans.cuda->def_property_readonly("scratch_bytes", &CudaPlan::scratch_bytes);
}

void bind_overlap(Plans& plans) {
  plans.cpu
      .def("flat_is_apart", [](const BucketPlan& plan, Address flat, int dtype, const Table& tensors) {
        return flat_is_apart(plan, flat_at(flat, dtype), tensors.view());
      })
      .def("is_disjoint", [](const BucketPlan& plan, Table& tensors) { return is_disjoint(tensors.sorted(plan)); })
      .def("lists_are_apart", [](const BucketPlan& plan, Table& out, Table& tensors) {
        return lists_are_apart(out.sorted(plan), tensors.sorted(plan), out.dtype == tensors.dtype);
      })
      .def("is_outside", [](const BucketPlan& plan, const Table& tensors, Address begin, Address end) {
        return is_outside(plan, tensors.view(), begin, end);
      });
}

void bind_roof(py::module_& m) {
  m.def("roof_read", [](Address src, int64_t n) { return ops().roof_read(at<float>(src), n); }, NoGil());
  m.def("roof_update", [](Address dst, int64_t n) { ops().roof_update(at<float>(dst), n); }, NoGil());
  m.def("roof_stream_copy", [](Address dst, Address src, int64_t n) {
    ops().roof_stream_copy(at<float>(dst), at<float>(src), n);
  }, NoGil());
}

}  // namespace

PYBIND11_MODULE(PYENGINE_MODULE, m) {
  if (!has_ops())
    throw py::import_error("it was built with PYENGINE_NATIVE=1 for an instruction set that this machine does not have");
  m.def("isa", [] { return ops().isa; });
  m.def("set_isa", &set_isa);
  m.attr("has_cuda") = kHasCuda;
  Plans plans{{m, "BucketPlan", py::module_local()}};
  if (kHasCuda) plans.cuda.emplace(m, "CudaPlan", py::module_local());
  bind_torch(m);
  bind_table(m);
  bind_plan(plans);
  bind_overlap(plans);
  bind_pack(plans);
  bind_accumulate(plans);
  bind_unscale_norm(plans);
  bind_exact(m, plans);
  bind_codec(m);
  bind_roof(m);
  bind_audit(m);
#ifdef PYENGINE_SHARED
  bind_shared(m);
#endif
}

// Binds the functions of the audit; see pyengine/audit/checksum.py and probe.py.
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "python.h"

namespace py = pybind11;

namespace pyengine {
namespace {

using Place = std::array<int64_t, 3>;  // start, stride, number

// Samples of one window's gradients, by subject, in memory that Python owns.
struct Notes {
  const uint8_t* is_over;  // 1: the window has been reduced; the next gradient begins a new window
  const Place* places;
  const double* weights;
  int64_t* arrivals;
  float *sums, *last, *lost;  // [subjects][width]
  int64_t width;
};

// Whether these elements exist and have a supported dtype.
bool has(const std::optional<TensorFacts>& facts, const Place& place) {
  const auto [start, stride, num] = place;
  return facts && dtype_of_scalar_type(facts->scalar_type) && start >= 0 && stride >= 1 &&
         (num <= 0 || start + (num - 1) * stride < facts->numel);
}

void sample(const TensorFacts& facts, const Place& place, double weight, float* sum, float* last) {
  const auto [start, stride, num] = place;
  const DType dtype = *dtype_of_scalar_type(facts.scalar_type);
  ops().sample({facts.data, dtype, start, stride, num, static_cast<float>(weight), sum, last});
}

// The range of words to read: all n words or, if turn >= 0, a range that moves with the turn. Defined in
// pyengine/audit/checksum.py.
std::pair<int64_t, int64_t> run_of(int64_t turn, int64_t n, int64_t run) {
  const int64_t room = n - run;
  return turn < 0 || room <= 0 ? std::pair(int64_t{0}, n) : std::pair(turn * 40503 % (room + 1), run);
}

WordWeights weights_of(Address weights, int64_t block) {
  if (block < 1) throw std::invalid_argument("expected blocks of at least one word");
  return {at<int32_t>(weights), block};
}

// One checksum per tensor; None if Python has to check the tensor.
std::vector<std::optional<int64_t>> checksums_of(Address weights, int64_t block,
                                                 const std::vector<py::object>& tensors,
                                                 const std::vector<int64_t>& turns, int64_t run) {
  const WordWeights rule = weights_of(weights, block);
  if (tensors.size() != turns.size() || run < 1)
    throw std::invalid_argument("expected one turn per tensor, and runs of at least one word");
  std::vector<std::optional<int64_t>> found(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::optional<TensorFacts> facts = facts_on_host(tensors[i].ptr());
    if (!facts || reinterpret_cast<uintptr_t>(facts->data) % sizeof(int32_t)) continue;
    const int64_t bytes = facts->numel * facts->element_size;
    if (bytes % sizeof(int32_t)) continue;
    const auto [start, n] = run_of(turns[i], bytes / 4, run);
    const py::gil_scoped_release no_gil;
    found[i] = ops().checksum(static_cast<const int32_t*>(facts->data) + start, n, rule);
  }
  return found;
}

// A gradient hook of a leaf. It passes tensors that it cannot read, and the first gradient of a window, to
// `rest`.
struct Listener {
  Notes notes;
  int64_t index;
  // A tuple of tensors. If none of them has a gradient, earlier gradients of this window were cleared.
  py::object owners;
  py::object rest;

  void operator()(const py::object& grad) const {
    const Place& place = notes.places[index];
    const std::optional<TensorFacts> facts = *notes.is_over ? std::nullopt : facts_on_host(grad.ptr());
    if (!has(facts, place)) {
      rest(grad);
      return;
    }
    float *sum = notes.sums + index * notes.width, *lost = notes.lost + index * notes.width;
    if (notes.arrivals[index]++ && begins_anew()) {
      for (int64_t i = 0; i < notes.width; ++i) lost[i] += std::exchange(sum[i], 0.0f);
    }
    sample(*facts, place, notes.weights[index], sum, notes.last + index * notes.width);
  }

  bool begins_anew() const {
    const Py_ssize_t num = PyTuple_GET_SIZE(owners.ptr());
    for (Py_ssize_t i = 0; i < num; ++i)
      if (!py::handle(PyTuple_GET_ITEM(owners.ptr(), i)).attr("grad").is_none()) return false;
    return num > 0;
  }
};

bool is_made(PyObject* self) {
  return reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().holder_constructed();
}

// A leaf and its hook refer to each other, so Python's garbage collector has to see the cycle.
void collect(PyHeapTypeObject* heap) {
  PyTypeObject* type = &heap->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!is_made(self)) return 0;
    const Listener& listener = py::cast<const Listener&>(py::handle(self));
    Py_VISIT(listener.owners.ptr());
    Py_VISIT(listener.rest.ptr());
    return 0;
  };
  type->tp_clear = [](PyObject* self) {
    if (!is_made(self)) return 0;
    Listener& listener = py::cast<Listener&>(py::handle(self));
    listener.owners = py::tuple();
    listener.rest = py::none();
    return 0;
  };
}

}  // namespace

void bind_audit(py::module_& m) {
  m.def("checksum", [](Address weights, int64_t block, Address words, int64_t n) {
    return ops().checksum(at<int32_t>(words), n, weights_of(weights, block));
  }, NoGil());
  m.def("checksums_of", &checksums_of);
  m.def("sample", [](py::handle tensor, int64_t start, int64_t stride, int64_t num, float weight, Address sum,
                     Address last) {
    const std::optional<TensorFacts> facts = facts_on_host(tensor.ptr());
    const Place place{start, stride, num};
    if (!has(facts, place)) return false;
    sample(*facts, place, weight, at<float>(sum), at<float>(last));
    return true;
  });
  py::class_<Notes>(m, "Notes", py::module_local())
      .def(py::init([](Address is_over, Address places, Address weights, Address arrivals, Address sums, Address last,
                       Address lost, int64_t width) {
        return Notes{at<uint8_t>(is_over), at<Place>(places), at<double>(weights),
                     at<int64_t>(arrivals), at<float>(sums), at<float>(last), at<float>(lost), width};
      }));
  py::class_<Listener>(m, "Listener", py::module_local(), py::custom_type_setup(&collect))
      .def(py::init([](const Notes& notes, int64_t index, py::tuple owners, py::object rest) {
        return Listener{notes, index, std::move(owners), std::move(rest)};
      }))
      .def("__call__", &Listener::operator());
}

}  // namespace pyengine

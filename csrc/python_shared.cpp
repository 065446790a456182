// Binds the shared memory of ranks; see pyengine/comm/arena.py.
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>

#include "python.h"
#include "shared_arena.h"

namespace py = pybind11;

namespace pyengine {
namespace {

using Block = py::class_<SharedBlock, std::shared_ptr<SharedBlock>>;
using Job = py::class_<SharedJob, std::shared_ptr<SharedJob>>;
using Arena = py::class_<SharedArena, std::shared_ptr<SharedArena>>;

std::shared_ptr<SharedJob> submit(SharedArena& arena, Address data, int64_t numel, int kind) {
  if (kind < 0 || kind >= kSharedKinds) throw std::invalid_argument("unknown kind of collective");
  return arena.submit(at<void>(data), numel, static_cast<SharedKind>(kind));
}

// Releases the GIL of the calling thread, except in the two callbacks.
void serve(SharedArena& arena, const py::function& on_wait, const py::function& on_done) {
  const py::gil_scoped_release no_gil;
  auto wait = [&](double seconds) {
    const py::gil_scoped_acquire gil;
    on_wait(seconds);
  };
  auto done = [&](const std::shared_ptr<SharedJob>& job) {
    const py::gil_scoped_acquire gil;
    on_done(job);
  };
  arena.serve(wait, done);
}

}  // namespace

void bind_shared(py::module_& m) {
  Block(m, "SharedBlock", py::buffer_protocol(), py::module_local()).def_buffer([](SharedBlock& block) {
    return py::buffer_info(static_cast<uint8_t*>(block.data()), block.bytes());
  });
  Job(m, "SharedJob", py::module_local());
  m.def("shared_file_size", &SharedFile::size);
  Arena(m, "SharedArena", py::module_local())
      .def(py::init<int, int, int>())
      .def("allocate", &SharedArena::allocate, NoGil())
      .def("submit", &submit, NoGil())
      .def("serve", &serve)
      .def("wait", &SharedArena::wait, NoGil())
      .def("error", &SharedArena::error)
      .def("call_back", &SharedArena::call_back)
      .def("fail", &SharedArena::fail)
      .def("missing", &SharedArena::missing)
      .def("close", &SharedArena::close, NoGil());
}

}  // namespace pyengine

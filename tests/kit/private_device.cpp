// Two devices that are none, under torch's key for devices of others (PrivateUse1): their memory is the host's, and all work is the CPU's,
// done at once. Tensors on them are no CPU tensors for anybody who asks; there are no queues, which tests/kit/lagging_device.py has.

#include <cstdlib>
#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::SymInt;
using c10::SymIntArrayRef;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
thread_local DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  c10::DeviceType type() const override { return KIND; }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device to) const override { current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  Device exchangeDevice(Device to) const override {
    auto before = getDevice();
    current = to.index();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  Stream getStream(Device on) const noexcept override { return Stream(Stream::DEFAULT, on); }
  Stream getNewStream(Device on, int) const override { return Stream(Stream::DEFAULT, on); }
  Stream exchangeStream(Stream to) const noexcept override { return Stream(Stream::DEFAULT, to.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* begin = nbytes ? std::aligned_alloc(64, (nbytes + 63) / 64 * 64) : nullptr;
    return {begin, begin, &std::free, Device(KIND, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { current = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return Guard().exchangeDevice(Device(KIND, to)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void*) const override { return false; }
};

// The same memory, as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

Device placed(std::optional<Device> device) {
  return device.has_value() && device->has_index() ? *device : Device(KIND, current);
}

Tensor empty(SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory, keys,
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView guard;
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

const Tensor& resize(const Tensor& tensor, SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* inside = tensor.unsafeGetTensorImpl();
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  size_t nbytes = (c10::multiply_integers(shape) + tensor.storage_offset()) * tensor.itemsize(), before = inside->storage().nbytes();
  if (before < nbytes) {
    c10::DeviceGuard guard(tensor.device());
    auto larger = memory.allocate(nbytes);
    if (before) std::memcpy(larger.get(), inside->storage().data(), before);
    inside->storage().set_data_ptr(std::move(larger));
    inside->storage().set_nbytes(nbytes);
  }
  inside->set_sizes_contiguous(shape);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) { return on_cpu(tensor).item(); }

Tensor as_strided(const Tensor& tensor, SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<SymInt> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  auto at_byte = offset.has_value() ? offset->expect_int() : tensor.storage_offset();
  view.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), at_byte);
  return view;
}

Tensor view(const Tensor& tensor, SymIntArrayRef sizes) {
  auto shape = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(sizes), tensor.numel());
  auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), shape);
  TORCH_CHECK(strides.has_value(), "these sizes need a copy: use reshape");
  return tensor.as_strided(shape, *strides, tensor.storage_offset());
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return tensor.as_strided(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), tensor.storage_offset());
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return tensor;
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("resize_", resize);
  library.impl("_local_scalar_dense", item);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("begin", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  module.def("current_device", [] { return static_cast<int>(current); });
  module.def("set_device", [](int index) { current = static_cast<DeviceIndex>(index); });
}

// A CUDA device in software, for a PyTorch that is built without CUDA; see __init__.py.
//
// Tensors of the device lie in host memory. The dispatch key CUDA has one fallback for all operators: it makes views of the
// arguments' bytes on the CPU, runs the CPU's kernel, and returns the results as tensors of the device. As on a GPU, an
// operator whose arguments lie on several devices is refused, backward runs in a thread of the device, and random numbers
// come from the device's own generator. Bytes are counted as the caching allocator counts them. Kernels end before their
// operator returns; order.h finds those that a GPU may run in another order.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "order.h"

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using Tensors = std::vector<Tensor>;

constexpr int kMostDevices = 8;
int num_devices = 1;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId current_stream[kMostDevices] = {};
std::atomic<int64_t> num_streams{0};

DeviceIndex index_of(std::optional<Device> device) {
  auto index = device.has_value() && device->has_index() ? device->index() : current;
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal");
  return index;
}

// Returns the current stream of a device.
order::Actor actor_of(DeviceIndex device) { return order::actor(device, current_stream[device]); }

struct OnDevice {
  DeviceIndex before = current;
  explicit OnDevice(DeviceIndex index) { current = index; }
  ~OnDevice() { current = before; }
};

// --- memory -------------------------------------------------------------------------------------------------------

struct Usage {
  std::atomic<int64_t> now{0}, peak{0}, limit{INT64_MAX};
};
Usage usage[kMostDevices];

// Returns the bytes that the allocator takes for a block.
int64_t rounded(size_t nbytes) { return static_cast<int64_t>((nbytes + 511) / 512 * 512); }

struct Block {
  c10::DataPtr memory;
  size_t nbytes;
  DeviceIndex device;
  order::Actor owner;  // The stream that it was allocated on.
  std::vector<order::Actor> users{};
  ~Block() {
    auto begin = reinterpret_cast<order::Address>(memory.get());
    order::all().free(owner, begin, nbytes, users);
    usage[device].now -= rounded(nbytes);
  }
};

void drop_block(void* block) { delete static_cast<Block*>(block); }

void require(size_t nbytes, DeviceIndex device) {
  auto& used = usage[device];
  TORCH_CHECK_WITH(OutOfMemoryError, used.now + rounded(nbytes) <= used.limit, "CUDA out of memory. Tried to allocate ",
                   static_cast<double>(nbytes) / (1 << 20), " MiB. GPU ", static_cast<int>(device), " is a stand-in.");
}

// Returns memory of the CPU as memory of a device, which counts it. The current stream is the first that touches it:
// where the allocator has it from, earlier kernels of that stream may still run.
c10::DataPtr on_device(c10::DataPtr memory, size_t nbytes, DeviceIndex device, const std::string& name) {
  require(nbytes, device);
  auto taken = rounded(nbytes);
  auto& used = usage[device];
  auto now = used.now += taken;
  auto before = used.peak.load();
  while (now > before && !used.peak.compare_exchange_weak(before, now)) {}
  auto* data = memory.get();
  order::all().step(actor_of(device));
  order::all().access(actor_of(device), reinterpret_cast<order::Address>(data), nbytes, true, name);
  auto* block = new Block{std::move(memory), nbytes, device, actor_of(device)};
  return {data, block, &drop_block, Device(DeviceType::CUDA, device)};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    require(n, current);
    return on_device(c10::GetCPUAllocator()->allocate(n), n, current, "an allocation");
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (auto* block = data.cast_context<Block>(&drop_block))
      block->users.push_back(order::actor(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { usage[device].peak = usage[device].now.load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto& used = usage[device];
    return {static_cast<size_t>(used.limit - used.now), static_cast<size_t>(used.limit)};
  }
};
DeviceMemory device_memory;

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;  // Size of each page-locked block, by its address.

bool pin(uintptr_t address, size_t size) {
  std::lock_guard lock(pinned_mutex);
  return pinned.emplace(address, size).second;
}

// Those who let memory go that CUDA has not allocated must have waited for its copies.
bool unpin(uintptr_t address, bool waits) {
  std::lock_guard lock(pinned_mutex);
  auto block = pinned.find(address);
  if (block == pinned.end()) return false;
  if (waits) order::all().forget(address, block->second);
  else order::all().free(order::kHost, address, block->second, {});
  pinned.erase(block);
  return true;
}

bool is_pinned(uintptr_t address) {
  std::lock_guard lock(pinned_mutex);
  auto next = pinned.upper_bound(address);
  return next != pinned.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    n = std::max<size_t>(n, 1);
    auto memory = c10::GetCPUAllocator()->allocate(n);
    auto* data = memory.get();
    pin(reinterpret_cast<uintptr_t>(data), n);
    auto drop = [](void* context) {
      auto* memory = static_cast<c10::DataPtr*>(context);
      unpin(reinterpret_cast<uintptr_t>(memory->get()), true);
      delete memory;
    };
    return {data, new c10::DataPtr(std::move(memory)), drop, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedMemory pinned_memory;

// Returns a pointer to a storage's bytes that keeps the storage alive.
c10::DataPtr keeping(const c10::Storage& storage, Device device) {
  auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  return {storage.unsafeGetStorageImpl()->mutable_data(), new c10::Storage(storage), drop, device};
}

// --- random numbers -----------------------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  explicit Generator(DeviceIndex index)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all[index < 0 ? current : index];
}

at::Generator& on_cpu(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

// Lends the state of the device's generator to the CPU's: for kernels that take none as an argument.
struct LentState {
  at::Generator& cpu = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
  at::Generator& own = on_cpu(default_generator(-1));
  Tensor before = Tensor(cpu.get_state());
  LentState() { cpu.set_state(Tensor(own.get_state())); }
  ~LentState() {
    own.set_state(Tensor(cpu.get_state()));
    cpu.set_state(before);
  }
};

// --- devices and streams ------------------------------------------------------------------------------------------

// The host waits for all streams of a device; those of other devices are waited for, too.
void synchronize(DeviceIndex) { order::all().synchronize(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device device(DeviceIndex index) { return {DeviceType::CUDA, index}; }
  static Stream stream(Device d, c10::StreamId id) { return Stream(Stream::UNSAFE, device(index_of(d)), id); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override { return device(std::exchange(current, d.index())); }
  Device getDevice() const override { return device(current); }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = std::max<DeviceIndex>(d.index(), 0); }
  Stream getStream(Device d) const override { return stream(d, current_stream[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream(d, ++num_streams); }
  Stream getNewStream(Device d, int) const override { return stream(d, ++num_streams); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), std::exchange(current_stream[s.device_index()], s.id()));
  }
  static order::Actor actor(const Stream& s) { return order::actor(s.device_index(), s.id()); }
  static order::Clock& point(void* event) { return *static_cast<order::Clock*>(event); }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new order::Clock;
    point(*event) = order::all().record(actor(s));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<order::Clock*>(event); }
  void block(void* event, const Stream& s) const override {
    if (event != nullptr) order::all().wait(actor(s), point(event));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  bool queryStream(const Stream& s) const override {
    synchronizeStream(s);
    return true;
  }
  void synchronizeStream(const Stream& s) const override { order::all().wait(order::kHost, order::all().record(actor(s))); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) order::all().wait(order::kHost, point(event));
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize(device); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(reinterpret_cast<uintptr_t>(data)); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  void deviceSynchronize(DeviceIndex device) const override { synchronize(device); }
};

// --- operators ----------------------------------------------------------------------------------------------------

order::Address address_of(const Tensor& tensor) { return reinterpret_cast<order::Address>(tensor.storage().data()); }

// Records that a stream or the host touches a tensor, from its first byte to its last.
void touch(order::Actor actor, const Tensor& tensor, bool writes, const std::string& name) {
  if (!tensor.has_storage() || tensor.numel() == 0) return;
  auto begin = address_of(tensor) + tensor.storage_offset() * tensor.itemsize();
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  bool host = actor == order::kHost;
  if (!host || is_pinned(begin)) order::all().access(actor, begin, (last + 1) * tensor.itemsize(), writes, name);
}

// In a kernel of the CPU that the device runs.
thread_local bool in_kernel = false;
struct InKernel {
  bool before = std::exchange(in_kernel, true);
  ~InKernel() { in_kernel = before; }
};

// Warns of an operator for which the host waits, or refuses it, as `torch.cuda.set_sync_debug_mode` asks.
std::atomic<int> wait_mode{0};
void note_wait(const std::string& name) {
  if (in_kernel) return;
  if (wait_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", name);
  TORCH_CHECK(wait_mode != 2, "called a synchronizing CUDA operation: ", name);
}

// Returns whether an operator gives a view, and touches no memory.
bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  return schema.name() == "aten::resize_" || schema.name() == "aten::set_";
}

// The arguments and results of one operator, on the device and as the CPU's kernel sees them.
class Call {
 public:
  Call(std::string name, bool may_mix) : name_(std::move(name)), may_mix_(may_mix) {}

  void use(DeviceIndex device) { device_ = device; }
  DeviceIndex device() const { return device_ < 0 ? current : device_; }

  Tensor to_cpu(const Tensor& tensor, bool writes) {
    if (!tensor.defined() || !(tensor.is_cpu() || tensor.is_cuda())) return tensor;
    accesses_.emplace_back(tensor, writes);
    // Scalars of the CPU go with any device.
    if (tensor.dim() > 0 && !may_mix_) {
      if (!seen_.has_value()) seen_ = tensor.device();
      TORCH_CHECK(*seen_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *seen_, " and ", tensor.device(), "! (when running ", name_, ")");
    }
    if (tensor.is_cpu()) {
      origins_.emplace(tensor.unsafeGetTensorImpl(), tensor);
      return tensor;
    }
    if (device_ < 0) device_ = tensor.device().index();
    auto known = views_.find(tensor.unsafeGetTensorImpl());
    if (known != views_.end()) return known->second.second;
    auto [storage, keys] = view_of(tensor.storage(), tensor.key_set());
    auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), cpu_keys, tensor.dtype());
    copy_layout(tensor, view);
    views_.emplace(tensor.unsafeGetTensorImpl(), std::make_pair(tensor, view));
    origins_.emplace(view.unsafeGetTensorImpl(), tensor);
    return view;
  }

  Tensor to_device(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    auto origin = origins_.find(result.unsafeGetTensorImpl());
    if (origin != origins_.end()) return origin->second;
    auto storage = result.storage();
    auto known = storages_.find(storage.unsafeGetStorageImpl());
    Tensor out;
    if (known == storages_.end()) {
      auto n = storage.nbytes();
      auto data = on_device(keeping(storage, Device(DeviceType::CPU)), n, device(), name_);
      c10::Storage made(c10::Storage::use_byte_size_t(), n, std::move(data), &device_memory, true);
      storages_.emplace(storage.unsafeGetStorageImpl(), std::make_pair(made, std::nullopt));
      out = at::detail::make_tensor<c10::TensorImpl>(std::move(made), cuda_keys, result.dtype());
    } else {
      auto [made, keys] = known->second;
      // A view of an argument is an inference tensor if the argument is one.
      out = keys ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(made), *keys, result.dtype())
                 : at::detail::make_tensor<c10::TensorImpl>(std::move(made), cuda_keys, result.dtype());
    }
    copy_layout(result, out);
    return out;
  }

  // Orders the kernel after what its stream waits for, and checks what it touches. The host waits for its end if it
  // `waits`, or if it is a copy from or to the host that is `blocking`.
  void launch(bool waits, bool blocking) {
    auto stream = actor_of(device());
    std::set<DeviceIndex> devices;
    for (const auto& [tensor, writes] : accesses_)
      if (tensor.is_cuda()) devices.insert(tensor.device().index());
    // A copy between devices waits for both, and both for it.
    for (auto each : devices) order::all().wait(stream, order::all().record(actor_of(each)));
    order::all().step(stream);
    bool copies = name_ == "aten::copy_", staged = false;
    for (const auto& [tensor, writes] : accesses_) {
      bool late = tensor.is_cuda() || (copies && is_pinned(address_of(tensor)));
      if (copies && !tensor.is_cuda()) {
        waits = waits || blocking;
        staged = writes && !late;  // Into pageable memory the driver copies at once, even if nobody asks it to.
      }
      touch(late ? stream : order::kHost, tensor, writes, name_);
    }
    for (auto each : devices) order::all().wait(actor_of(each), order::all().record(stream));
    if (waits) note_wait(name_);
    if (waits || staged) order::all().wait(order::kHost, order::all().record(stream));
  }

  // Takes sizes and memory that the kernel has given to its arguments over to the tensors of the device.
  void write_back() {
    for (auto& [original, view] : given_) {
      auto* storage = original.unsafeGetStorageImpl();
      if (view.data() == storage->data() && view.nbytes() == storage->nbytes()) continue;
      auto data = on_device(keeping(view, Device(DeviceType::CPU)), view.nbytes(), storage->device().index(), name_);
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(view.nbytes());
    }
    for (auto& [impl, pair] : views_) copy_layout(pair.second, pair.first);
  }

 private:
  static constexpr c10::DispatchKeySet cpu_keys{c10::DispatchKey::CPU}, cuda_keys{c10::DispatchKey::CUDA};

  static void copy_layout(const Tensor& from, const Tensor& to) {
    auto* impl = to.unsafeGetTensorImpl();
    if (to.sizes() != from.sizes() || to.strides() != from.strides() || to.storage_offset() != from.storage_offset())
      impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    if (to.is_conj() != from.is_conj()) impl->_set_conj(from.is_conj());
    if (to.is_neg() != from.is_neg()) impl->_set_neg(from.is_neg());
  }

  std::pair<c10::Storage, c10::DispatchKeySet> view_of(const c10::Storage& storage, c10::DispatchKeySet keys) {
    for (auto& [original, view] : given_)
      if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return {view, keys};
    c10::DataPtr data(storage.unsafeGetStorageImpl()->mutable_data(), Device(DeviceType::CPU));
    c10::Storage view(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
    given_.emplace_back(storage, view);
    storages_.emplace(view.unsafeGetStorageImpl(), std::make_pair(storage, std::make_optional(keys)));
    return {view, keys};
  }

  std::string name_;
  bool may_mix_;
  DeviceIndex device_ = -1;
  std::vector<std::pair<Tensor, bool>> accesses_;  // Arguments, and whether they are written to.
  std::optional<Device> seen_;
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> views_;  // Of each argument: itself, and its view.
  std::unordered_map<c10::TensorImpl*, Tensor> origins_;                   // Of each view: the argument.
  std::vector<std::pair<c10::Storage, c10::Storage>> given_;               // Storages of arguments, and their views.
  // Of each storage on the CPU: that on the device, and the keys of the argument that it belongs to.
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, std::optional<c10::DispatchKeySet>>> storages_;
};

// A GPU copies indices of the CPU by itself.
const std::set<std::string> kMayMix = {"aten::copy_",      "aten::index",      "aten::_unsafe_index", "aten::index_put",
                                       "aten::index_put_", "aten::_index_put_impl_"};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  Call call(op.schema().name(), kMayMix.count(op.schema().name()) > 0);
  bool has_generator = false, blocking = true, masked = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (arguments[i].name() == "non_blocking" && value.isBool()) blocking = !value.toBool();
    if (value.isTensor()) {
      value = call.to_cpu(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& each : value.toTensorVector()) all.push_back(call.to_cpu(each, writes));
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (std::optional<Tensor> each : value.toOptionalTensorList()) {
        all.push_back(each.has_value() ? std::make_optional(call.to_cpu(*each, writes)) : each);
        masked = masked || (each.has_value() && (!each->is_cuda() || !at::isIntegralType(each->scalar_type(), false)));
      }
      value = std::move(all);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      call.use(index_of(value.toDevice()));
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator() || (value.isNone() && arguments[i].name() == "generator")) {
      has_generator = true;
      value = on_cpu(value.isNone() ? default_generator(-1) : value.toGenerator());
    }
  }
  if (!is_view(op.schema())) {
    bool sized = op.hasTag(at::Tag::dynamic_output_shape) && op.schema().name() != "aten::index";
    call.launch(masked || sized || op.hasTag(at::Tag::data_dependent_output), blocking);
  }
  {
    InKernel inside;
    std::optional<LentState> state;
    if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) state.emplace();
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.write_back();
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> all;
      for (const Tensor& each : value.toTensorVector()) all.push_back(call.to_device(each));
      value = std::move(all);
    }
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::kFloat));
}

Tensor& set_view(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "set_: a storage on ", source.device(), " for a tensor on ", self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  c10::SymInt size(static_cast<int64_t>(source.nbytes() / self.dtype().itemsize()));
  return set_view(self, std::move(source), 0, {size}, {c10::SymInt(1)});
}

Tensor& set_nothing(Tensor& self) { return set_storage(self, at::empty({0}, self.options()).storage()); }

void record_stream(Tensor& tensor, Stream stream) { device_memory.recordStream(tensor.storage().data_ptr(), stream); }

// Kernels that only CUDA has.

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& bias) {
  auto gates = input + hidden;
  if (bias && bias->defined()) gates = gates + *input_bias + *bias;
  auto parts = gates.chunk(4, 1);
  auto in = parts[0].sigmoid(), keep = parts[1].sigmoid(), value = parts[2].tanh(), out = parts[3].sigmoid();
  auto next = keep * cell + in * value;
  return {out * next.tanh(), next, at::cat({in, keep, value, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& of_hidden, const std::optional<Tensor>& of_cell,
                                                      const Tensor& cell, const Tensor& next, const Tensor& gates, bool has_bias) {
  auto parts = gates.chunk(4, 1);
  auto &in = parts[0], &keep = parts[1], &value = parts[2], &out = parts[3];
  auto squashed = next.tanh();
  auto hidden = of_hidden && of_hidden->defined() ? *of_hidden : at::zeros_like(next);
  auto grad = hidden * out * (1 - squashed * squashed);
  if (of_cell && of_cell->defined()) grad = grad + *of_cell;
  auto all = at::cat({grad * value * in * (1 - in), grad * cell * keep * (1 - keep), grad * in * (1 - value * value),
                      hidden * squashed * out * (1 - out)}, 1);
  return {all, grad * keep, has_bias ? all.sum(0, false) : Tensor()};
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  InKernel inside;
  return at::histc(self.to(at::kCPU, at::kDouble), bins, low, high).to(self.device(), self.scalar_type());
}

template <Tensor (*kernel)(const Tensor&, int64_t, bool)>
Tensor softmax(const Tensor& self, int64_t dim, bool to_float) {
  InKernel inside;
  return kernel((to_float ? self.to(at::kFloat) : self).to(at::kCPU), dim, false).to(self.device());
}

template <Tensor (*kernel)(const Tensor&, const Tensor&, int64_t, at::ScalarType)>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  InKernel inside;
  return kernel(grad.to(at::kCPU), output.to(at::kCPU), dim, grad.scalar_type()).to(grad.device(), dtype);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_view);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  // Their kernels for all devices look for one of CUDA.
  for (const auto* name : {"copy_", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("histc", &histc);
  m.impl("_softmax", &softmax<at::_softmax>);
  m.impl("_log_softmax", &softmax<at::_log_softmax>);
  m.impl("_softmax_backward_data", &softmax_backward<at::_softmax_backward_data>);
  m.impl("_log_softmax_backward_data", &softmax_backward<at::_log_softmax_backward_data>);
}

// Operators of the CPU touch page-locked memory as the host.
std::unique_ptr<at::ObserverContext> host_operator(const at::RecordFunction& function) {
  static const std::set<std::string> none = {"aten::to", "aten::_to_copy", "aten::contiguous", "aten::is_pinned", "aten::detach"};
  if (in_kernel) return nullptr;
  auto name = function.operator_name();
  if (!name || none.count(name->name) > 0) return nullptr;
  bool pinned = false;
  auto each_tensor = [&](const at::IValue& value, auto&& with) {
    if (value.isTensor()) with(value.toTensor());
    else if (value.isTensorList())
      for (const Tensor& each : value.toTensorVector()) with(each);
  };
  for (const auto& value : function.inputs()) {
    bool device = false;
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      device = device || tensor.is_cuda();
      pinned = pinned || (tensor.is_cpu() && is_pinned(address_of(tensor)));
    });
    if (device) return nullptr;
  }
  if (!pinned) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || is_view(op->schema())) return nullptr;
  const auto& arguments = op->schema().arguments();
  order::all().step(order::kHost);
  for (size_t i = 0; i < std::min(arguments.size(), function.inputs().size()); ++i) {
    bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    each_tensor(function.inputs()[i], [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cpu()) touch(order::kHost, tensor, writes, name->name);
    });
  }
  return nullptr;
}

void resize_storage(const Tensor& bytes, int64_t nbytes) {
  auto* storage = bytes.storage().unsafeGetStorageImpl();
  OnDevice on(storage->device().index());
  auto data = nbytes ? device_memory.allocate(nbytes) : c10::DataPtr(nullptr, storage->device());
  if (auto kept = std::min<size_t>(storage->nbytes(), nbytes)) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

// --- NCCL ---------------------------------------------------------------------------------------------------------

Tensor on_host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type());
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  auto data = keeping(tensor.storage(), Device(DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

Tensors on_host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(on_host(tensor));
  return views;
}

struct Done final : c10d::Work {
  Tensors inputs, outputs;  // Inputs are kept until somebody has waited.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  order::Clock end;
  Done(Tensors read, Tensors given, order::Clock point, int rank, c10d::OpType type)
      : c10d::Work(rank, type), inputs(std::move(read)), outputs(std::move(given)), end(std::move(point)) {
    std::vector<Device> devices{Device(DeviceType::CUDA, current)};
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(at::IValue(outputs));
    finish();
  }
  ~Done() override { order::all().wait(order::kHost, end); }
  bool isCompleted() override {
    order::all().wait(order::kHost, end);
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (retrieveOpType() == c10d::OpType::BARRIER) order::all().wait(order::kHost, end);
    return true;
  }
  void synchronize() override {
    order::all().wait(actor_of(current), end);
    inputs.clear();
  }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

using Pending = c10::intrusive_ptr<c10d::Work>;

// Collectives of tensors on the device, by gloo. They have ended when they return.
struct Nccl : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  uint64_t calls = 0;
  int64_t stream = ++num_streams;

  Nccl(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout)
      : c10d::Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)), options(c10::make_intrusive<Options>("nccl", timeout)) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls; }

  // Begins a collective on the group's own stream, after the work on the current one.
  void begin(const Tensors& inputs, const Tensors& outputs) {
    auto own = order::actor(current, stream);
    order::all().wait(own, order::all().record(actor_of(current)));
    order::all().step(own);
    for (const auto& each : inputs) touch(own, each, false, "a collective");
    for (const auto& each : outputs) touch(own, each, true, "a collective");
  }
  Pending done(Tensors inputs, Tensors outputs, c10d::OpType type) {
    ++calls;
    auto before = std::exchange(current_stream[current], stream);  // A future's end is that of the group's stream.
    auto work = c10::make_intrusive<Done>(std::move(inputs), std::move(outputs), order::all().record(actor_of(current)), getRank(), type);
    current_stream[current] = before;
    return work;
  }
  void all_reduce(Tensor tensor, c10d::ReduceOp op) {  // Gloo has no mean.
    bool mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions how;
    how.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors one{tensor};
    gloo->allreduce(one, how)->wait();
    if (mean) tensor.div_(getSize());
  }
  void reduce_scatter(const Tensor& output, const Tensor& whole, c10d::ReduceOp op) {
    auto sum = whole.clone();
    all_reduce(sum, op);
    output.view({-1}).copy_(sum.view({getSize(), -1})[getRank()]);
  }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& how) override {
    begin({}, tensors);
    for (const auto& each : on_host(tensors)) all_reduce(each, how.reduceOp);
    return done({}, tensors, c10d::OpType::ALLREDUCE);
  }
  Pending allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& how) override {
    begin({}, tensors);
    for (const auto& each : on_host(tensors)) all_reduce(each, how.reduceOp);
    return done({}, tensors, c10d::OpType::ALLREDUCE_COALESCED);
  }
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& how) override {
    begin({}, tensors);
    auto views = on_host(tensors);
    auto sum = views[0].clone();  // Only the root's tensor may change.
    all_reduce(sum, how.reduceOp);
    if (getRank() == how.rootRank) views[0].copy_(sum);
    return done({}, tensors, c10d::OpType::REDUCE);
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    begin({}, tensors);
    auto views = on_host(tensors);
    gloo->broadcast(views, how)->wait();
    return done({}, tensors, c10d::OpType::BROADCAST);
  }
  Pending allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    begin(inputs, outputs[0]);
    std::vector<Tensors> parts{on_host(outputs[0])};
    auto views = on_host(inputs);
    gloo->allgather(parts, views, how)->wait();
    return done(inputs, outputs[0], c10d::OpType::ALLGATHER);
  }
  Pending _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& how) override {
    begin({input}, {output});
    std::vector<Tensors> parts{on_host(output).view({-1}).chunk(getSize())};
    Tensors views{on_host(input).view({-1})};
    gloo->allgather(parts, views, how)->wait();
    return done({input}, {output}, c10d::OpType::_ALLGATHER_BASE);
  }
  Pending allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], how);
    return done(inputs, outputs, c10d::OpType::COALESCED);
  }
  Pending reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& how) override {
    begin(inputs[0], outputs);
    Tensors parts;
    for (const auto& each : on_host(inputs[0])) parts.push_back(each.view({-1}));
    reduce_scatter(on_host(outputs[0]), at::cat(parts), how.reduceOp);
    return done(inputs[0], outputs, c10d::OpType::REDUCE_SCATTER);
  }
  Pending _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& how) override {
    begin({input}, {output});
    reduce_scatter(on_host(output), on_host(input), how.reduceOp);
    return done({input}, {output}, c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  Pending reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& how) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], how);
    return done(inputs, outputs, c10d::OpType::COALESCED);
  }
  Pending barrier(const c10d::BarrierOptions& how) override {
    gloo->barrier(how)->wait();
    return done({}, {}, c10d::OpType::BARRIER);
  }
  Pending send(Tensors& tensors, int to, int tag) override {
    begin(tensors, {});
    auto views = on_host(tensors);
    gloo->send(views, to, tag)->wait();
    return done(tensors, {}, c10d::OpType::SEND);
  }
  Pending recv(Tensors& tensors, int from, int tag) override {
    begin({}, tensors);
    auto views = on_host(tensors);
    gloo->recv(views, from, tag)->wait();
    return done({}, tensors, c10d::OpType::RECV);
  }
};

// DDP times its steps on the device.
struct StepTimer final : c10d::Timer {
  explicit StepTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimestamp(end).value_or(0) - getTimestamp(start).value_or(0);
  }
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, StepTimer)
}

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)  // PyTorch looks for this name.
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &device_memory, 1);
  m.def("set_devices", [](int number, int64_t bytes) {
    num_devices = number;
    for (int i = 0; i < number; ++i) usage[i].limit = bytes;
  });
  m.def("limit", [](int device, int64_t bytes) { usage[device].limit = bytes; });
  m.def("device", [] { return static_cast<int>(current); });
  m.def("exchange_device", [](int index) {
    return static_cast<int>(index < 0 ? current : std::exchange(current, static_cast<DeviceIndex>(index)));
  });
  m.def("new_stream", [] { return ++num_streams; });
  m.def("stream", [](int device) { return current_stream[device]; });
  m.def("exchange_stream", [](int device, int64_t id) { return std::exchange(current_stream[device], id); });
  m.def("allocated", [](int device) { return usage[device].now.load(); });
  m.def("peak", [](int device) { return usage[device].peak.load(); });
  m.def("reset_peak", [](int device) { device_memory.resetPeakStats(static_cast<DeviceIndex>(device)); });
  m.def("pin", &pin);
  m.def("unpin", [](uintptr_t address) { return unpin(address, false); });
  m.def("record", [](int device, int64_t stream) { return order::all().record(order::actor(device, stream)); });
  m.def("wait", [](int device, int64_t stream, const order::Clock& point) { order::all().wait(order::actor(device, stream), point); });
  m.def("host_wait", [](const order::Clock& point) { order::all().wait(order::kHost, point); });
  m.def("host_knows", [](const order::Clock& point) { return order::all().knows(order::kHost, point); });
  m.def("synchronize", [](int device) { synchronize(static_cast<DeviceIndex>(device)); });
  m.def("record_stream", [](Tensor& tensor, const py::object& stream) {
    auto on = Stream::UNSAFE;
    auto index = stream.attr("device_index").cast<DeviceIndex>();
    record_stream(tensor, Stream(on, Device(DeviceType::CUDA, index), stream.attr("stream_id").cast<int64_t>()));
  });
  m.def("check_order", [](bool checks) { order::all().checks = checks; });
  m.def("set_wait_mode", [](int mode) { wait_mode = mode; });
  m.def("wait_mode", [] { return wait_mode.load(); });
  at::addGlobalCallback(at::RecordFunctionCallback(&host_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  m.def("resize_storage", &resize_storage);
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(static_cast<DeviceIndex>(device))));
  });
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(m, "Nccl")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, double seconds) {
        return c10::make_intrusive<Nccl>(std::move(gloo), std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
      }));
}

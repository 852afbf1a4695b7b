// GPUs in software: a plug-in by TensorFlow's C API for devices of type "GPU", whose memory is the host's.
//
// The contract:
//   - What a kernel computes is there when its op returns, and a copy within a device, too. The time that they take is
//     not over by then: it is spent on the stream, behind all that was enqueued before. That is what a GPU shows to who
//     may not look at its memory before the stream is there; and no op can meet memory that is not written yet.
//   - A copy to or from a device begins when its stream comes to it, takes its time, and is done at its end.
//   - Devices are TensorFlow's logical ones. Those that a GPU is cut into have streams and memory of their own; the time
//     of their kernels, and of their copies each way, is the GPU's, which spends it on one after the other.
//   - Kernels are the CPU's, and there are only those that the list names, with the host memory that it names.
//   - Memory comes from TensorFlow's own allocator, which gets as much as was asked for.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/core/common_runtime/pluggable_device/pluggable_device_factory.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/public/session_options.h"

namespace softgpu {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kMostDevices = 16;
constexpr size_t kNameLength = 120;
constexpr char kPlatform[] = "SOFTGPU";

double Now() { return Seconds(Clock::now().time_since_epoch()).count(); }

void SleepUntil(double seconds) { std::this_thread::sleep_for(Seconds(std::max(0.0, seconds - Now()))); }

// The layouts of Settings, Copy and Run are repeated in loading.py, the order of Kind, too.
struct Settings {
  double kernel_seconds = 0;      // what each kernel takes
  double element_seconds = 0;     // and each element of its largest input or output
  double bytes_per_second = 0;    // of copies; 0: as fast as the host copies
  double speed = 1;               // by which kernels are divided
};

enum Kind : int32_t { kToDevice = 0, kToHost = 1, kBetween = 2, kWithin = 3 };

struct Copy {
  int32_t kind;
  int32_t sender;    // -1: the host
  int32_t receiver;  // -1: the host
  uint64_t bytes;
  double start_seconds, end_seconds;
  char tensor[kNameLength];  // the node that made it; if that is not known, the first one that read it; else empty
};

struct Run {
  int32_t device;
  char op[kNameLength];
  int64_t count;
  double seconds;  // of its stream
};

void SetName(char* target, const std::string& name) {
  std::strncpy(target, name.c_str(), kNameLength - 1);
  target[kNameLength - 1] = 0;
}

// What does one thing at a time.
class Engine {
 public:
  // Takes seconds of it, as soon as it is free and not before `came`, by the clock and not by when threads wake up.
  // Returns when they begin.
  double Take(double came, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    const double begin = std::max(came, free_);
    free_ = begin + seconds;
    return begin;
  }

 private:
  std::mutex mutex_;
  double free_ = 0;
};

struct Device {
  int gpu;
  uint64_t memory_bytes;
};

// What the devices of this process are, and what happened on them.
class World {
 public:
  int count = 2;  // of GPUs
  uint64_t memory_bytes = 512ull << 20;
  std::string kernels;
  std::vector<Device> devices;  // of TensorFlow, from when it has made them

  int GpuOf(int device) const { return device < 0 ? -1 : devices[device].gpu; }

  // Of a device's GPU: for kernels (kWithin), and for copies of each other kind.
  Engine& engine(int device, Kind kind) { return engines_[GpuOf(device)][kind]; }

  Settings settings(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return settings_[GpuOf(device)];
  }

  void Configure(int gpu, const Settings& settings) {
    std::lock_guard<std::mutex> lock(mutex_);
    settings_[gpu] = settings;
  }

  void Clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.clear();
    runs_.clear();
    unread_.clear();
  }

  void AddRegion(void* from, uint64_t bytes, int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    regions_[static_cast<char*>(from)] = {bytes, device};
  }

  void DropRegion(void* from) {
    std::lock_guard<std::mutex> lock(mutex_);
    regions_.erase(static_cast<char*>(from));
  }

  int DeviceOf(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto* byte = static_cast<const char*>(address);
    auto region = regions_.upper_bound(const_cast<char*>(byte));
    if (region == regions_.begin()) return -1;
    --region;
    return byte < region->first + region->second.first ? region->second.second : -1;
  }

  void Copied(Kind kind, int sender, int receiver, const void* from, const void* to, uint64_t bytes, double start,
              double end) {
    std::lock_guard<std::mutex> lock(mutex_);
    Copy copy{kind, sender, receiver, bytes, start, end, ""};
    const auto made = makers_.find(from);
    if (sender >= 0 && made != makers_.end()) SetName(copy.tensor, made->second);
    if (kind == kToDevice) unread_[to] = copies_.size();
    if (kind == kBetween) makers_[to] = copy.tensor;
    copies_.push_back(copy);
  }

  void Ran(int device, const std::string& op, const std::string& node, const std::vector<const void*>& read,
           const std::vector<const void*>& made, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& [count, taken] = runs_[{device, op}];
    ++count;
    taken += seconds;
    for (const void* address : read) {
      const auto place = unread_.find(address);
      if (place == unread_.end()) continue;
      SetName(copies_[place->second].tensor, node);
      unread_.erase(place);
    }
    for (const void* address : made) makers_[address] = node;
  }

  int64_t Copies(Copy* copies, int64_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t size = copies_.size();
    if (copies == nullptr) return size;
    std::copy_n(copies_.begin(), std::min(size, capacity), copies);
    return std::min(size, capacity);
  }

  int64_t Runs(Run* runs, int64_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (runs == nullptr) return runs_.size();
    int64_t number = 0;
    for (const auto& [which, what] : runs_) {
      if (number == capacity) break;
      Run& run = runs[number++];
      run.device = which.first;
      SetName(run.op, which.second);
      run.count = what.first;
      run.seconds = what.second;
    }
    return number;
  }

 private:
  std::mutex mutex_;
  Settings settings_[kMostDevices];
  Engine engines_[kMostDevices][kWithin + 1];
  std::map<char*, std::pair<uint64_t, int>> regions_;       // where each device's memory lies
  std::map<const void*, std::string> makers_;               // which node wrote a tensor there last
  std::map<const void*, size_t> unread_;                    // copies to a device that nobody read yet
  std::vector<Copy> copies_;
  std::map<std::pair<int, std::string>, std::pair<int64_t, double>> runs_;
};

World& TheWorld() {
  static World* world = new World;  // never destroyed: streams outlive main
  return *world;
}

// A flag that some threads wait for.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t asked = 0, done = 0;

  uint64_t Ask() {
    std::lock_guard<std::mutex> lock(mutex);
    return ++asked;
  }
  void Reach(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex);
    done = std::max(done, number);
    changed.notify_all();
  }
  void WaitFor(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done >= number; });
  }
};

}  // namespace softgpu

// TensorFlow names these.
struct SP_Event_st {
  std::shared_ptr<softgpu::Signal> signal = std::make_shared<softgpu::Signal>();
};

struct SP_Timer_st {};

struct SP_Stream_st {
  explicit SP_Stream_st(int device) : device(device), thread_([this] { Run(); }) {}

  ~SP_Stream_st() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void Push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  // Time of kernels passes on the stream, when the GPU has it.
  void Spend(double seconds) {
    if (seconds <= 0) return;
    Push([this, came = softgpu::Now(), seconds] {
      softgpu::SleepUntil(softgpu::TheWorld().engine(device, softgpu::kWithin).Take(came, seconds) + seconds);
    });
  }

  void WaitUntilDone() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty() && !busy_; });
  }

  const int device;

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      task();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false, ends_ = false;
  std::thread thread_;  // the last one: it uses the others
};

namespace softgpu {

void Ok(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

// Memory.

void* Aligned(uint64_t bytes) { return aligned_alloc(256, (std::max<uint64_t>(bytes, 1) + 255) / 256 * 256); }

void Allocate(const SP_Device* device, uint64_t bytes, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = Aligned(bytes);
  memory->size = bytes;
  TheWorld().AddRegion(memory->opaque, bytes, device->ordinal);
}

void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  TheWorld().DropRegion(memory->opaque);
  free(memory->opaque);
  memory->opaque = nullptr;
  memory->size = 0;
}

// Copies. `stream` is null for one that the caller waits for.

void Transfer(SP_Stream stream, Kind kind, int sender, int receiver, void* to, const void* from, uint64_t bytes) {
  const int device = std::max(sender, receiver);
  const Settings settings = TheWorld().settings(device);
  double seconds = settings.bytes_per_second > 0 ? bytes / settings.bytes_per_second : 0;
  if (TheWorld().GpuOf(sender) == TheWorld().GpuOf(receiver)) seconds = 0;  // it does not leave the GPU's memory
  const auto transfer = [=] {
    const double start = TheWorld().engine(device, kind).Take(Now(), seconds);
    std::memcpy(to, from, bytes);
    SleepUntil(start + seconds);
    TheWorld().Copied(kind, sender, receiver, from, to, bytes, start, Now());
  };
  stream == nullptr ? transfer() : stream->Push(transfer);
}

void ToHost(const SP_Device* device, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
            TF_Status* status) {
  Transfer(stream, kToHost, device->ordinal, -1, to, from->opaque, bytes);
  Ok(status);
}

void ToDevice(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes,
              TF_Status* status) {
  Transfer(stream, kToDevice, -1, device->ordinal, to->opaque, from, bytes);
  Ok(status);
}

void BetweenDevices(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                    uint64_t bytes, TF_Status* status) {
  const int sender = TheWorld().DeviceOf(from->opaque), receiver = TheWorld().DeviceOf(to->opaque);
  if (sender >= 0 && receiver >= 0 && sender != receiver) {
    Transfer(stream, kBetween, sender, receiver, to->opaque, from->opaque, bytes);
  } else {  // as a kernel (see above); a kernel's own buffers may lie on the host
    const double start = Now();
    std::memmove(to->opaque, from->opaque, bytes);
    TheWorld().Copied(kWithin, device->ordinal, device->ordinal, from->opaque, to->opaque, bytes, start, Now());
  }
  Ok(status);
}

void WaitedToHost(const SP_Device* device, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes, TF_Status* status) {
  ToHost(device, nullptr, to, from, bytes, status);
}

void WaitedToDevice(const SP_Device* device, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes, TF_Status* status) {
  ToDevice(device, nullptr, to, from, bytes, status);
}

void WaitedBetween(const SP_Device* device, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                   TF_Status* status) {
  BetweenDevices(device, nullptr, to, from, bytes, status);
}

void Set32(void* target, uint32_t value, uint64_t bytes) {
  std::fill_n(static_cast<uint32_t*>(target), bytes / 4, value);
}

// The table that TensorFlow calls.

void MakeExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status* status) {
  SP_StreamExecutor* to = params->stream_executor;
  to->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  to->allocate = Allocate;
  to->deallocate = Deallocate;
  to->host_memory_allocate = [](const SP_Device*, uint64_t bytes) { return Aligned(bytes); };
  to->host_memory_deallocate = [](const SP_Device*, void* memory) { free(memory); };
  to->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return false; };
  to->device_memory_usage = [](const SP_Device* device, int64_t* free_bytes, int64_t* total_bytes) -> TF_Bool {
    *free_bytes = *total_bytes = TheWorld().devices[device->ordinal].memory_bytes;
    return true;
  };

  to->create_stream = [](const SP_Device* device, SP_Stream* stream, TF_Status* status) {
    *stream = new SP_Stream_st(device->ordinal);
    Ok(status);
  };
  to->destroy_stream = [](const SP_Device*, SP_Stream stream) { delete stream; };
  to->create_stream_dependency = [](const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status* status) {
    auto signal = std::make_shared<Signal>();
    other->Push([signal] { signal->Reach(1); });
    dependent->Push([signal] { signal->WaitFor(1); });
    Ok(status);
  };
  to->get_stream_status = [](const SP_Device*, SP_Stream, TF_Status* status) { Ok(status); };
  to->block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status* status) {
    stream->WaitUntilDone();
    Ok(status);
  };
  to->synchronize_all_activity = [](const SP_Device*, TF_Status* status) { Ok(status); };
  to->host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn callback, void* argument) -> TF_Bool {
    stream->Push([=] {
      TF_Status* status = TF_NewStatus();
      callback(argument, status);
      TF_DeleteStatus(status);
    });
    return true;
  };

  to->create_event = [](const SP_Device*, SP_Event* event, TF_Status* status) {
    *event = new SP_Event_st;
    Ok(status);
  };
  to->destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  to->get_event_status = [](const SP_Device*, SP_Event event) {
    std::lock_guard<std::mutex> lock(event->signal->mutex);
    return event->signal->done >= event->signal->asked ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  to->record_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status* status) {
    stream->Push([signal = event->signal, number = event->signal->Ask()] { signal->Reach(number); });
    Ok(status);
  };
  to->wait_for_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status* status) {
    stream->Push([signal = event->signal, number = event->signal->asked] { signal->WaitFor(number); });
    Ok(status);
  };
  to->block_host_for_event = [](const SP_Device*, SP_Event event, TF_Status* status) {
    event->signal->WaitFor(event->signal->asked);
    Ok(status);
  };

  to->create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status* status) {
    *timer = new SP_Timer_st;
    Ok(status);
  };
  to->destroy_timer = [](const SP_Device*, SP_Timer timer) { delete timer; };
  to->start_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status* status) { Ok(status); };
  to->stop_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status* status) { Ok(status); };

  to->memcpy_dtoh = ToHost;
  to->memcpy_htod = ToDevice;
  to->memcpy_dtod = BetweenDevices;
  to->sync_memcpy_dtoh = WaitedToHost;
  to->sync_memcpy_htod = WaitedToDevice;
  to->sync_memcpy_dtod = WaitedBetween;
  to->mem_zero = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint64_t bytes, TF_Status* status) {
    std::memset(memory->opaque, 0, bytes);
    Ok(status);
  };
  to->memset = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint8_t value, uint64_t bytes,
                  TF_Status* status) {
    std::memset(memory->opaque, value, bytes);
    Ok(status);
  };
  to->memset32 = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint32_t value, uint64_t bytes,
                    TF_Status* status) {
    Set32(memory->opaque, value, bytes);
    Ok(status);
  };
  Ok(status);
}

void MakeDevice(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status* status) {
  params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
  params->device->ordinal = params->ordinal;
  params->device->device_handle = nullptr;
  params->device->hardware_name = "software GPU";
  params->device->device_vendor = "none";
  params->device->pci_bus_id = "0";
  Ok(status);
}

void MakeDeviceFunctions(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status* status) {
  params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  params->device_fns->get_numa_node = [](const SP_Device*) -> int32_t { return -1; };
  params->device_fns->get_memory_bandwidth = [](const SP_Device*) -> int64_t { return -1; };
  params->device_fns->get_gflops = [](const SP_Device*) -> double { return -1; };
  Ok(status);
}

void MakeTimerFunctions(const SP_Platform*, SP_TimerFns* functions, TF_Status* status) {
  functions->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
  functions->nanoseconds = [](SP_Timer) -> uint64_t { return 0; };
  Ok(status);
}

// Kernels.

SP_Stream StreamOf(tensorflow::OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  SP_Stream stream = TF_GetStream(reinterpret_cast<TF_OpKernelContext*>(context), status);
  TF_DeleteStatus(status);
  return stream;
}

// A kernel of the CPU, which takes time of the device's stream.
class Kernel : public tensorflow::OpKernel {
 public:
  explicit Kernel(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::shared_ptr<const tensorflow::NodeProperties> properties;
    OP_REQUIRES_OK(construction, tensorflow::NodeProperties::CreateFromNodeDef(
                                     construction->def(), tensorflow::OpRegistry::Global(), &properties));
    tensorflow::OpKernel* kernel = nullptr;
    OP_REQUIRES_OK(construction,
                   tensorflow::CreateOpKernel(tensorflow::DeviceType("CPU"), construction->device(), nullptr,
                                              construction->function_library(), properties,
                                              construction->graph_def_version(), &kernel));
    kernel_.reset(kernel);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    std::vector<const void*> read, made;
    int64_t elements = 0;
    const auto note = [&](const tensorflow::Tensor& tensor, std::vector<const void*>* where) {
      elements = std::max<int64_t>(elements, tensor.NumElements());
      if (tensor.NumElements() && tensorflow::DataTypeCanUseMemcpy(tensor.dtype())) where->push_back(tensor.data());
    };
    for (int i = 0; i < context->num_inputs(); ++i) {
      if (context->has_input(i) && !context->input_is_ref(i)) note(context->input(i), &read);
    }
    if (tensorflow::AsyncOpKernel* kernel = kernel_->AsAsync()) {
      Signal signal;
      kernel->ComputeAsync(context, [&] { signal.Reach(1); });
      signal.WaitFor(1);
    } else {
      kernel_->Compute(context);
    }
    for (int i = 0; i < context->num_outputs(); ++i) {
      if (const tensorflow::Tensor* result = context->mutable_output(i)) note(*result, &made);
    }
    if (SP_Stream stream = StreamOf(context)) {
      const Settings settings = TheWorld().settings(stream->device);
      const double seconds = (settings.kernel_seconds + settings.element_seconds * elements) / settings.speed;
      TheWorld().Ran(stream->device, type_string(), name(), read, made, seconds);
      stream->Spend(seconds);
    }
  }

 private:
  std::unique_ptr<tensorflow::OpKernel> kernel_;
};

// The work of the simulated accelerators beside this: `2 * rows + 1`, and the seconds of its rows on the stream.
template <typename T>
class Work : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& rows = context->input(0);
    tensorflow::Tensor* results = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, rows.shape(), &results));
    const auto from = rows.flat<T>();
    auto to = results->flat<T>();
    for (int64_t i = 0; i < from.size(); ++i) to(i) = 2 * from(i) + 1;
    double seconds = 0;
    const auto each = context->input(1).flat<float>();
    for (int64_t i = 0; i < each.size(); ++i) seconds += each(i);
    SP_Stream stream = StreamOf(context);
    const Settings settings = TheWorld().settings(stream->device);
    seconds = seconds / settings.speed;
    TheWorld().Ran(stream->device, type_string(), name(), {rows.data()}, {results->data()}, seconds);
    stream->Spend(seconds);
  }
};

template <typename K>
struct KernelFactory : tensorflow::kernel_factory::OpKernelFactory {
  tensorflow::OpKernel* Create(tensorflow::OpKernelConstruction* construction) override { return new K(construction); }
};

template <typename K>
void Register(const tensorflow::KernelDef& kernel) {
  tensorflow::kernel_factory::OpKernelRegistrar registered(new tensorflow::KernelDef(kernel), "softgpu",
                                                           std::make_unique<KernelFactory<K>>());
}

template <typename T>
void RegisterWork(const char* op) {
  tensorflow::KernelDefBuilder kernel(op);
  Register<Work<T>>(*std::unique_ptr<const tensorflow::KernelDef>(
      kernel.Device("GPU").TypeConstraint<T>("T").Build()));
}

std::vector<std::string> Parts(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

// Where the factory for plug-ins finds its options: with those of GPUs before there was a field for them.
template <typename Config>
auto PluginOptions(Config* config, int) -> decltype(config->mutable_pluggable_device_options()) {
  return config->mutable_pluggable_device_options();
}
template <typename Config>
tensorflow::GPUOptions* PluginOptions(Config* config, long) {
  return config->mutable_gpu_options();
}

// Makes the devices that TensorFlow makes of GPUs of its own: several of one that
// `tf.config.set_logical_device_configuration` cuts. The factory for plug-ins does not do that; here it makes one of each.
class DeviceFactory : public tensorflow::PluggableDeviceFactory {
 public:
  DeviceFactory() : PluggableDeviceFactory("GPU", kPlatform) {}

  absl::Status CreateDevices(const tensorflow::SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<tensorflow::Device>>* devices) override {
    if (TheWorld().devices.empty()) TheWorld().devices = Cut(options.config.gpu_options());
    tensorflow::SessionOptions all = options;
    tensorflow::GPUOptions* of_plugin = PluginOptions(&all.config, 0);
    of_plugin->Clear();
    of_plugin->set_per_process_gpu_memory_fraction(1);  // else some is left to other programs
    return PluggableDeviceFactory::CreateDevices(all, prefix, devices);
  }

 private:
  static std::vector<Device> Cut(const tensorflow::GPUOptions& options) {
    std::vector<std::string> visible = Parts(options.visible_device_list(), ',');
    for (int gpu = 0; options.visible_device_list().empty() && gpu < TheWorld().count; ++gpu) {
      visible.push_back(std::to_string(gpu));
    }
    const auto& cuts = options.experimental().virtual_devices();  // none, or as many as are visible
    std::vector<Device> devices;
    for (int i = 0; i < static_cast<int>(visible.size()); ++i) {
      std::vector<uint64_t> limits;
      if (i < cuts.size()) {
        for (const double mebibytes : cuts[i].memory_limit_mb()) limits.push_back(mebibytes * (1 << 20));
      }
      if (limits.empty()) limits.push_back(TheWorld().memory_bytes);
      for (const uint64_t limit : limits) devices.push_back({std::stoi(visible[i]), limit});
    }
    return devices;
  }
};

// A line of the list: `op [label=l] [host=input,output] [T=float,half] ...`
bool Parse(const std::string& line, tensorflow::KernelDef* kernel) {
  const auto words = Parts(line, ' ');
  if (words.empty() || words[0][0] == '#') return false;
  kernel->set_op(words[0]);
  kernel->set_device_type("GPU");
  kernel->set_priority(100);  // before those that a build for real GPUs has
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t at = words[i].find('=');
    const std::string name = words[i].substr(0, at);
    for (const std::string& value : Parts(words[i].substr(at + 1), ',')) {
      if (name == "host") {
        kernel->add_host_memory_arg(value);
      } else if (name == "label") {
        kernel->set_label(value);
      } else {
        if (kernel->constraint().empty() || kernel->constraint(kernel->constraint_size() - 1).name() != name) {
          kernel->add_constraint()->set_name(name);
        }
        tensorflow::DataType dtype;
        if (!tensorflow::DataTypeFromString(value, &dtype)) return false;  // of a newer TensorFlow
        kernel->mutable_constraint(kernel->constraint_size() - 1)->mutable_allowed_values()->mutable_list()->add_type(dtype);
      }
    }
  }
  return true;
}

void RegisterKernels() {
  std::set<std::string> computed;
  const tensorflow::KernelList all = tensorflow::GetAllRegisteredKernels();
  for (const auto& kernel : all.kernel()) {
    if (kernel.device_type() == "CPU") computed.insert(kernel.op());
  }
  std::ifstream list(TheWorld().kernels);
  for (std::string line; std::getline(list, line);) {
    tensorflow::KernelDef kernel;
    if (Parse(line, &kernel) && computed.count(kernel.op())) Register<Kernel>(kernel);
  }
  for (const char* op : {"SimulatedWork", "SimulatedStatefulWork"}) {
    RegisterWork<float>(op);
    RegisterWork<double>(op);
    RegisterWork<int32_t>(op);
    RegisterWork<int64_t>(op);
  }
}

}  // namespace softgpu

extern "C" {

__attribute__((visibility("default"))) void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status* status) {
  SP_Platform* platform = params->platform;
  platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  platform->name = softgpu::kPlatform;
  platform->type = "GPU";
  platform->supports_unified_memory = false;
  platform->use_bfc_allocator = true;
  platform->force_memory_growth = true;
  SP_PlatformFns* functions = params->platform_fns;
  functions->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  functions->get_device_count = [](const SP_Platform*, int* count, TF_Status* status) {
    *count = std::max<int>(softgpu::TheWorld().count, softgpu::TheWorld().devices.size());
    softgpu::Ok(status);
  };
  functions->create_device = softgpu::MakeDevice;
  functions->destroy_device = [](const SP_Platform*, SP_Device*) {};
  functions->create_device_fns = softgpu::MakeDeviceFunctions;
  functions->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  functions->create_stream_executor = softgpu::MakeExecutor;
  functions->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  functions->create_timer_fns = softgpu::MakeTimerFunctions;
  functions->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  softgpu::Ok(status);
}

__attribute__((visibility("default"))) void TF_InitKernel() {
  const int priority = tensorflow::DeviceFactory::DevicePriority("GPU") + 1;  // instead of the one for plug-ins
  tensorflow::DeviceFactory::Register("GPU", std::make_unique<softgpu::DeviceFactory>(), priority, true);
  softgpu::RegisterKernels();
}

void softgpu_start(int32_t count, uint64_t memory_bytes, const char* kernels) {
  softgpu::TheWorld().count = count;
  softgpu::TheWorld().memory_bytes = memory_bytes;
  softgpu::TheWorld().kernels = kernels;
}

void softgpu_configure(int32_t gpu, const softgpu::Settings* settings) {
  softgpu::TheWorld().Configure(gpu, *settings);
}

void softgpu_clear() { softgpu::TheWorld().Clear(); }

// How many there are if the first argument is null; else copies at most `capacity` of them and says how many.
int64_t softgpu_copies(softgpu::Copy* copies, int64_t capacity) { return softgpu::TheWorld().Copies(copies, capacity); }

int64_t softgpu_runs(softgpu::Run* runs, int64_t capacity) { return softgpu::TheWorld().Runs(runs, capacity); }

}

// Counts what is sent between devices: TensorFlow's own kernels of _Send and _HostSend, which count what they send.
//
// TensorFlow cuts a graph up by device, and every tensor that another part needs goes through such an op, in each turn of a
// loop anew. A kernel of higher priority takes the place of another one, in graphs that are made after the library is
// loaded.

#include <atomic>
#include <cstdint>
#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/kernels/sendrecv_ops.h"
#include "tensorflow/core/kernels/tensor_list.h"

namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

std::atomic<int64_t> tensors{0}, lists{0}, bytes{0};

// Of a list, those of all its tensors; TotalBytes tells the size of a handle.
int64_t BytesOf(const Tensor& tensor) {
  if (tensor.dtype() != tensorflow::DT_VARIANT) return tensor.TotalBytes();
  int64_t total = 0;
  for (int64_t i = 0; i < tensor.NumElements(); ++i) {
    const auto* list = tensor.flat<tensorflow::Variant>()(i).get<tensorflow::TensorList>();
    if (list == nullptr) continue;
    for (const Tensor& element : list->tensors()) total += BytesOf(element);
  }
  return total;
}

class CountingSend : public tensorflow::SendOp {
 public:
  explicit CountingSend(OpKernelConstruction* construction) : SendOp(construction) {
    std::string from, to;
    OP_REQUIRES_OK(construction, construction->GetAttr("send_device", &from));
    OP_REQUIRES_OK(construction, construction->GetAttr("recv_device", &to));
    travels_ = from != to;  // else between a device's own memory and its host's
  }

  void Compute(OpKernelContext* context) override {
    if (travels_ && !context->is_input_dead()) {  // dead: of a branch that is not taken, or behind the last turn of a loop
      const Tensor& sent = context->input(0);
      tensors += 1;
      lists += sent.dtype() == tensorflow::DT_VARIANT;
      bytes += BytesOf(sent);
    }
    SendOp::Compute(context);
  }

 private:
  bool travels_;
};

#define REGISTER_SEND(DEVICE)                                                          \
  REGISTER_KERNEL_BUILDER(Name("_Send").Device(DEVICE).Priority(1), CountingSend);     \
  REGISTER_KERNEL_BUILDER(Name("_HostSend").Device(DEVICE).HostMemory("tensor").Priority(1), CountingSend)
REGISTER_SEND("CPU");
REGISTER_SEND("GPU");

}  // namespace

extern "C" {

// The layout of the three numbers is repeated in traffic.py; what was counted is forgotten.
void sends_take(int64_t* counts) {
  counts[0] = tensors.exchange(0);
  counts[1] = lists.exchange(0);
  counts[2] = bytes.exchange(0);
}

}  // extern "C"

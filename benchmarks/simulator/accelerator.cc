// Two ops that take time of a simulated accelerator, and the C functions that set one up and read what happened on it.
//
// The contract:
//   - Each device has one stream: calls run one at a time, in the order in which they came.
//   - A call starts when it comes and the calls before it have ended. It ends its duration later, by the clock and not
//     by when a thread woke up, so that calls that queue leave no gap.
//   - Nobody waits for a call but the thread of its stream, and that one sleeps: no inter-op thread is held, no CPU is
//     taken.
//   - A cancelled call leaves the stream at once; the calls behind it move up.
//   - A call is in the log before its op is done, so that who has the result also finds the call.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace simulator {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using Clock = std::chrono::steady_clock;

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
constexpr double kLongestSeconds = 1e8;  // three years: the clock's arithmetic overflows at 292

// The layouts of Settings and Record are repeated in simulation.py, the order of Outcome in accounting.py.
struct Settings {
  double speed = 1;                // work seconds per second
  double overhead_seconds = 0;     // taken by each call, whatever the speed
  int64_t memory_rows = kNone;     // most rows in one call
  int64_t fails_from_call = kNone; // first call that fails, counted from 0 since the device was set up
  int64_t fails_for_calls = kNone; // how many do
  int32_t error_code = 0;          // with what
};

enum Outcome : int32_t { kFinished = 0, kRefused = 1, kCancelled = 2 };

struct Record {
  int32_t device;
  int32_t outcome;
  int64_t rows;
  double arrived_seconds;
  double start_seconds;
  double end_seconds;
};

// What one call asks for.
struct Work {
  int64_t rows = 0;
  double seconds = 0;
  int64_t poisoned_row = -1;  // the first one whose seconds are negative or not a number
};

// All calls that ended since the last Clear, in the order in which they did.
class Log {
 public:
  int64_t epoch() {
    std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
  }

  void Clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.clear();
    ++epoch_;
  }

  // A call that came before the last Clear is not of interest any more.
  void Append(const Record& record, int64_t epoch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (epoch == epoch_) records_.push_back(record);
  }

  int64_t Read(Record* records, int64_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t size = records_.size();
    if (records == nullptr) return size;
    std::copy_n(records_.begin(), std::min(size, capacity), records);
    return std::min(size, capacity);
  }

 private:
  std::mutex mutex_;
  std::vector<Record> records_;
  int64_t epoch_ = 0;
};

Log& TheLog() {
  static Log* log = new Log;  // never destroyed: the threads of the streams outlive main
  return *log;
}

double SecondsAt(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

class Stream {
 public:
  using Finish = std::function<void(const absl::Status&)>;

  explicit Stream(int32_t device) : device_(device) { std::thread(&Stream::Run, this).detach(); }

  void Configure(const Settings& settings) {
    std::lock_guard<std::mutex> lock(mutex_);
    settings_ = settings;
    arrivals_ = 0;
  }

  // Calls `finish` exactly once: now, on this thread, if the call is refused; else from the thread of the stream.
  void Submit(const Work& work, CancellationManager* manager, Finish finish) {
    auto call = std::make_shared<Call>();
    call->rows = work.rows;
    call->manager = manager;
    call->finish = std::move(finish);
    call->epoch = TheLog().epoch();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call->arrived = call->start = call->end = Clock::now();
      call->status = Refusal(work);
      call->outcome = call->status.ok() ? kFinished : kRefused;
      // Under the lock, so that a cancellation that comes now finds the call in the queue.
      if (call->status.ok() && Register(call)) {
        call->duration = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
            std::min(work.seconds / settings_.speed + settings_.overhead_seconds, kLongestSeconds)));
        queue_.push_back(call);
        if (queue_.size() == 1) StartFront();
        changed_.notify_one();
        return;
      }
    }
    End(*call);
  }

 private:
  struct Call {
    int64_t rows;
    int64_t epoch;
    Clock::duration duration{};
    Clock::time_point arrived, start, end;
    absl::Status status;
    Outcome outcome;
    bool cancelled = false;
    CancellationManager* manager;
    CancellationToken token = CancellationManager::kInvalidToken;
    Finish finish;
  };

  std::string Name() const { return "CPU:" + std::to_string(device_); }

  // Counts a call, and says why the device does not take it, if so.
  absl::Status Refusal(const Work& work) {
    const int64_t number = arrivals_++;
    if (number >= settings_.fails_from_call && number - settings_.fails_from_call < settings_.fails_for_calls) {
      return absl::Status(static_cast<absl::StatusCode>(settings_.error_code),
                          Name() + " is broken: it fails call " + std::to_string(number) + " since it was set up");
    }
    if (work.rows > settings_.memory_rows) {
      return absl::ResourceExhaustedError(Name() + " is out of memory: it has room for " +
                                          std::to_string(settings_.memory_rows) + " rows per call, and this one has " +
                                          std::to_string(work.rows));
    }
    if (work.poisoned_row >= 0) {
      return absl::InvalidArgumentError("row " + std::to_string(work.poisoned_row) + " of the " +
                                        std::to_string(work.rows) + " rows of a call on " + Name() +
                                        " is poisoned: its seconds are negative or not a number");
    }
    return absl::OkStatus();
  }

  bool Register(const std::shared_ptr<Call>& call) {
    if (call->manager == nullptr) return true;
    call->token = call->manager->get_cancellation_token();
    const bool registered = call->manager->RegisterCallback(call->token, [this, call] {
      std::lock_guard<std::mutex> lock(mutex_);
      call->cancelled = true;
      changed_.notify_one();
    });
    if (!registered) {
      call->manager = nullptr;
      Cancel(*call);
    }
    return registered;
  }

  void Cancel(Call& call) const {
    call.status = absl::CancelledError("a call on " + Name() + " was cancelled");
    call.outcome = kCancelled;
  }

  // The life of the stream's thread: end what is over, sleep until the next is.
  void Run() {
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the kernel may be 50 microseconds late otherwise
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const auto ended = TakeEnded(Clock::now());
      if (!ended.empty()) {
        lock.unlock();  // what follows may wait for a cancellation, which takes the lock
        for (const auto& call : ended) End(*call);
        lock.lock();
      } else if (queue_.empty()) {
        changed_.wait(lock);
      } else {
        changed_.wait_until(lock, queue_.front()->end);
      }
    }
  }

  std::vector<std::shared_ptr<Call>> TakeEnded(Clock::time_point now) {
    std::vector<std::shared_ptr<Call>> ended;
    while (!queue_.empty() && (queue_.front()->cancelled || queue_.front()->end <= now)) {
      const auto call = queue_.front();
      if (call->cancelled) {
        call->end = std::max(now, call->start);
        Cancel(*call);
      }
      free_ = call->end;
      queue_.pop_front();
      if (!queue_.empty()) StartFront();
      ended.push_back(call);
    }
    for (auto place = queue_.begin(); place != queue_.end();) {
      if ((*place)->cancelled) {  // behind the front: it has not begun
        (*place)->start = (*place)->end = now;
        Cancel(**place);
        ended.push_back(*place);
        place = queue_.erase(place);
      } else {
        ++place;
      }
    }
    return ended;
  }

  void StartFront() {
    Call& call = *queue_.front();
    call.start = std::max(call.arrived, free_);
    call.end = call.start + call.duration;
  }

  void End(Call& call) const {
    if (call.manager != nullptr && call.token != CancellationManager::kInvalidToken) {
      call.manager->DeregisterCallback(call.token);  // after this nobody else knows the call
    }
    TheLog().Append({device_, call.outcome, call.rows, SecondsAt(call.arrived), SecondsAt(call.start),
                     SecondsAt(call.end)},
                    call.epoch);
    call.finish(call.status);
  }

  const int32_t device_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Call>> queue_;  // the front one is running
  Clock::time_point free_;                   // when the last call left
  Settings settings_;
  int64_t arrivals_ = 0;  // since the last Configure
};

class Streams {
 public:
  Stream& Of(int32_t device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stream = streams_[device];
    if (stream == nullptr) stream = std::make_unique<Stream>(device);
    return *stream;
  }

  void Reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, stream] : streams_) stream->Configure(Settings());
    TheLog().Clear();
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, std::unique_ptr<Stream>> streams_;
};

Streams& TheStreams() {
  static Streams* streams = new Streams;  // never destroyed, as the log
  return *streams;
}

template <typename T>
class WorkOp : public tensorflow::AsyncOpKernel {
 public:
  using tensorflow::AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    const tensorflow::Tensor& rows = context->input(0);
    const tensorflow::Tensor& seconds = context->input(1);
    OP_REQUIRES_ASYNC(context,
                      seconds.dims() == 0 || (seconds.dims() == 1 && rows.dims() > 0 &&
                                              rows.dim_size(0) == seconds.dim_size(0)),
                      absl::InvalidArgumentError("seconds has shape " + seconds.shape().DebugString() +
                                                 " and rows has shape " + rows.shape().DebugString() +
                                                 "; expected seconds [n] for rows [n, ...], or one number for one row"),
                      done);
    tensorflow::Tensor* results = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, rows.shape(), &results), done);
    const auto from = rows.flat<T>();
    auto to = results->flat<T>();
    for (int64_t i = 0; i < from.size(); ++i) to(i) = 2 * from(i) + 1;

    TheStreams()
        .Of(context->device()->parsed_name().id)
        .Submit(WorkIn(seconds), context->cancellation_manager(), [context, done](const absl::Status& status) {
          if (!status.ok()) context->SetStatus(status);
          done();
        });
  }

 private:
  static Work WorkIn(const tensorflow::Tensor& seconds) {
    Work work;
    const auto values = seconds.flat<float>();
    work.rows = values.size();
    for (int64_t row = 0; row < work.rows; ++row) {
      if (work.poisoned_row < 0 && !(values(row) >= 0)) work.poisoned_row = row;
      work.seconds += values(row);
    }
    return work;
  }
};

absl::Status WorkShape(tensorflow::shape_inference::InferenceContext* c) {
  tensorflow::shape_inference::ShapeHandle rows = c->input(0);
  tensorflow::shape_inference::ShapeHandle seconds;
  TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(1), 1, &seconds));
  if (c->RankKnown(seconds) && c->Rank(seconds) == 1) {
    tensorflow::shape_inference::DimensionHandle count;
    TF_RETURN_IF_ERROR(c->WithRankAtLeast(rows, 1, &rows));
    if (c->RankKnown(rows)) {
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(rows, 0), c->Dim(seconds, 0), &count));
      TF_RETURN_IF_ERROR(c->ReplaceDim(rows, 0, count, &rows));
    }
  }
  c->set_output(0, rows);
  return absl::OkStatus();
}

REGISTER_OP("SimulatedWork")
    .Input("rows: T")
    .Input("seconds: float")
    .Output("results: T")
    .Attr("T: {float, double, int32, int64}")
    .SetShapeFn(WorkShape);

REGISTER_OP("SimulatedStatefulWork")
    .Input("rows: T")
    .Input("seconds: float")
    .Output("results: T")
    .Attr("T: {float, double, int32, int64}")
    .SetIsStateful()
    .SetShapeFn(WorkShape);

#define REGISTER_WORK(T)                                                                                              \
  REGISTER_KERNEL_BUILDER(                                                                                            \
      Name("SimulatedWork").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), WorkOp<T>);                        \
  REGISTER_KERNEL_BUILDER(                                                                                            \
      Name("SimulatedStatefulWork").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), WorkOp<T>)

REGISTER_WORK(float);
REGISTER_WORK(double);
REGISTER_WORK(int32_t);
REGISTER_WORK(int64_t);

}  // namespace simulator

extern "C" {

void simulator_configure(int32_t device, const simulator::Settings* settings) {
  simulator::TheStreams().Of(device).Configure(*settings);
}

void simulator_reset() { simulator::TheStreams().Reset(); }

// How many calls the log holds if `records` is null; else copies at most `capacity` of them and says how many.
int64_t simulator_log(simulator::Record* records, int64_t capacity) {
  return simulator::TheLog().Read(records, capacity);
}

}

/* One range of memory for torch's large CPU blocks: best fit, neighbours merged, nothing given back while it is wanted again.
 *
 * The C library keeps large and small blocks in one heap, where a small one that stays pins the hole beside it: equal runs
 * take different amounts of memory. Here are only large blocks, so how much is touched follows from the order in which they
 * are asked for and freed. Blocks are whole pages at the lowest address that fits best.
 */
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr size_t PAGE = 4096;

struct Block {
    size_t size;
    bool is_free;
};

class Arena final : public c10::Allocator {
  public:
    /* Returns false when the range cannot be had. It takes no memory until it is written to. */
    bool open(size_t num_bytes, size_t smallest) {
        void *range = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED) return false;
        base_ = static_cast<char *>(range), size_ = num_bytes, smallest_ = smallest;
        others_ = c10::GetCPUAllocator();
        return true;
    }

    bool is_open() const { return base_ != nullptr; }

    c10::DataPtr allocate(size_t num_bytes) override {
        void *data = num_bytes < smallest_ ? nullptr : take((num_bytes + PAGE - 1) / PAGE * PAGE);
        if (data) c10::profiledCPUMemoryReporter().New(data, num_bytes);
        else data = others_->raw_allocate(num_bytes);
        return {data, data, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override;

    /* Around a fork no other thread is inside, so that the child finds the arena whole and unlocked. */
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

    void copy_data(void *to, const void *from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }

    void release(void *data) {
        auto at = static_cast<char *>(data);
        if (at < base_ || at >= base_ + size_) {
            others_->raw_deleter()(data);
            return;
        }
        c10::profiledCPUMemoryReporter().Delete(data);
        give(at - base_);
    }

    /* Bytes of the blocks in use, the most since the last call, and the part of the range that ever held one. */
    void measure(int64_t *out) {
        std::lock_guard<std::mutex> guard(mutex_);
        const size_t values[] = {used_, peak_used_, extent_};
        std::copy(values, values + 3, out);
        peak_used_ = used_;
    }

    /* Free pages to the system. */
    void give_back() {
        std::lock_guard<std::mutex> guard(mutex_);
        for (auto [size, offset] : holes_) madvise(base_ + offset, size, MADV_DONTNEED);
    }

  private:
    /* nullptr when the range is full. */
    char *take(size_t size) {
        std::lock_guard<std::mutex> guard(mutex_);
        auto hole = holes_.lower_bound({size, 0});
        size_t offset = hole == holes_.end() ? extend(size) : hole->second;
        if (offset == size_) return nullptr;
        size_t found = blocks_.at(offset).size;
        drop_hole(blocks_.find(offset));
        blocks_[offset] = {size, false};
        if (found > size) add_hole(offset + size, found - size);
        used_ += size, peak_used_ = std::max(peak_used_, used_);
        return base_ + offset;
    }

    /* Offset of a hole of that size at the end of the range, which was or becomes the last block; size_ when it is full. */
    size_t extend(size_t size) {
        size_t offset = extent_;
        if (!blocks_.empty() && blocks_.rbegin()->second.is_free) offset = blocks_.rbegin()->first;
        if (size > size_ - offset) return size_;
        if (offset < extent_) drop_hole(std::prev(blocks_.end()));
        add_hole(offset, size);
        extent_ = offset + size;
        return offset;
    }

    void give(size_t offset) {
        std::lock_guard<std::mutex> guard(mutex_);
        auto block = blocks_.find(offset);
        size_t size = block->second.size;
        used_ -= size;
        auto next = blocks_.erase(block);
        if (next != blocks_.end() && next->second.is_free) {
            size += next->second.size;
            next = drop_hole(next);
        }
        if (next != blocks_.begin() && std::prev(next)->second.is_free) {
            offset = std::prev(next)->first, size += std::prev(next)->second.size;
            drop_hole(std::prev(next));
        }
        add_hole(offset, size);
    }

    using Blocks = std::map<size_t, Block>; /* by offset, without gaps */

    void add_hole(size_t offset, size_t size) {
        blocks_[offset] = {size, true};
        holes_.insert({size, offset});
    }

    Blocks::iterator drop_hole(Blocks::iterator hole) {
        holes_.erase({hole->second.size, hole->first});
        return blocks_.erase(hole);
    }

    std::mutex mutex_;
    char *base_ = nullptr;
    size_t size_ = 0, extent_ = 0, smallest_ = 0, used_ = 0, peak_used_ = 0;
    c10::Allocator *others_ = nullptr; /* of blocks that are small, or older than the arena */
    Blocks blocks_;
    std::set<std::pair<size_t, size_t>> holes_; /* (size, offset) */
};

Arena &arena() {
    static auto *it = new Arena; /* never destroyed: tensors outlive everything else at exit */
    return *it;
}

void free_block(void *data) { arena().release(data); }

c10::DeleterFnPtr Arena::raw_deleter() const { return &free_block; }

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

/* torch's CPU blocks of `smallest` bytes and more come from a range of num_bytes from now on. Returns 1 where that cannot be. */
EXPORT int dsv4_arena_open(size_t num_bytes, size_t smallest) {
    if (arena().is_open()) return 0;
    if (!arena().open(num_bytes, smallest)) return 1;
    pthread_atfork([] { arena().lock(); }, [] { arena().unlock(); }, [] { arena().unlock(); });
    c10::SetCPUAllocator(&arena(), 255);
    return c10::GetCPUAllocator() == &arena() ? 0 : 1;
}

EXPORT void dsv4_arena_measure(int64_t *out) { arena().measure(out); }

EXPORT void dsv4_arena_give_back() { arena().give_back(); }

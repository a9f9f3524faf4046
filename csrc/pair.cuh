// Two CTAs of a cluster that attend to the same keys, for two heads or two blocks of rows: tiles are copied for both.
// They claim neighbouring items together, tell each other what theirs is of, and share tiles where that is the same.
// Then they visit the same tiles in the same order, and before that their rings have come to the first stage. Of two heads
// each takes units of both, so that neither waits where one head skips more.
#pragma once
#include "pipeline.cuh"
#include "ptx/cluster.cuh"
#include "work_item.cuh"

constexpr int PAIR = 2;

FS_DEVICE uint32_t rank_in_pair() { return blockIdx.x % PAIR; }
FS_DEVICE uint32_t at_other(uint32_t address) { return shared_of_rank(address, rank_in_pair() ^ 1); }

// What the two schedulers tell each other. In shared memory.
struct PairTalk {
  uint4 other;         // what the other's item is of
  uint32_t next_item;  // of the second CTA, from the first; in the first one, whether the second one has none any more
  uint64_t told, claimed, wanted;

  FS_DEVICE void initialise() {
    if (rank_in_pair() == 0) next_item = 0;  // the other's is only written by the first CTA
    for (uint64_t* barrier : {&told, &claimed, &wanted}) mbarrier_init(shared_address(barrier), 1);
  }
};

// A scheduler's side of the talk. The first CTA claims for both, when both want their next items. Its numbers are lower:
// the second one has no item left before the first one or together with it, and then tells so and no more. What is sent
// to a CTA is always waited for there, so nothing is under way when it ends.
template <bool CAUSAL>
struct PairScheduler {
  PairTalk& talk;
  bool pairs;  // else each CTA claims for itself

  FS_DEVICE static bool is_first() { return rank_in_pair() == 0; }

  // The first CTA goes on without the second one.
  FS_DEVICE bool is_alone() const { return is_first() && ld_shared(shared_address(&talk.next_item)) != 0; }

  // Wants item number `turn` of this CTA; the first CTA also claims it, and the other's.
  template <class Params, class Scheduler>
  FS_DEVICE void claim(const Params& p, Scheduler& scheduler, uint32_t turn) const {
    const bool lane_0 = threadIdx.x % 32 == 0;
    if (!pairs) {
      scheduler.claim(p, 1);
    } else if (!is_first()) {
      if (lane_0) mbarrier_arrive_there(at_other(shared_address(&talk.wanted)));
    } else {
      if (lane_0) talk.next_item = static_cast<int>(talk.other.x) < 0;
      __syncwarp();
      if (!is_alone()) mbarrier_wait(shared_address(&talk.wanted), (turn - 1) % 2);
      scheduler.claim(p, PAIR);
      if (lane_0 && !is_alone()) {
        st_async(at_other(shared_address(&talk.next_item)), scheduler.claimed + 1, at_other(shared_address(&talk.claimed)));
      }
    }
  }

  // Receives the number of the second CTA's item.
  FS_DEVICE void receive(uint32_t& claimed, uint32_t turn) const {
    if (!pairs || is_first() || turn == 0) return;
    if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(shared_address(&talk.claimed), sizeof(talk.next_item));
    mbarrier_wait_cluster(shared_address(&talk.claimed), (turn - 1) % 2);
    claimed = ld_shared(shared_address(&talk.next_item));
  }

  // Whether the other CTA's item is of the same tiles: without a causal limit all of a KV head are, that have units.
  FS_DEVICE bool agree(const WorkItem& work, uint32_t turn) const {
    if (!pairs || is_alone()) return false;
    const uint4 own = make_uint4(work.request, work.kv_head, CAUSAL ? work.block : 0, work.order.end);
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_expect_tx(shared_address(&talk.told), sizeof(own));
      st_async_v4(at_other(shared_address(&talk.other)), own, at_other(shared_address(&talk.told)));
    }
    mbarrier_wait_cluster(shared_address(&talk.told), turn % 2);
    const uint4 other = ld_shared_v4(shared_address(&talk.other));
    const bool same = own.x == other.x && own.y == other.y && own.z == other.z && own.w == other.w;
    return work.request >= 0 && !work.is_short && same;
  }
};

// Of an item that is paired for another head, beside this one, takes every second unit.
FS_DEVICE void exchange_heads(WorkItem& work) {
  for (int unit = 1; unit < MOST_UNITS; unit += 2) work.units[unit].head += rank_in_pair() == 0 ? 1 : -1;
}

// Turns of a ring until it is at its first stage; a turn takes `PARTS` stages.
template <int PARTS = 1, int STAGES>
FS_DEVICE int turns_to_first_stage(RingPosition<STAGES> ring) {
  int turns = 0;
  for (; ring.stage != 0; ring.advance(PARTS)) turns++;
  return turns;
}

// Which chunks of a tile this CTA copies: all, for itself, or every second one, for both.
struct Copies {
  bool for_both = false;
  uint32_t first = 0;

  FS_DEVICE bool have(uint32_t chunk) const { return !for_both || (chunk + first) % PAIR == 0; }
};

// Of a CTA that fills its stages alone.
struct NoMeeting {
  FS_DEVICE void operator()(bool) const {}
};

// Where both CTAs fill a stage in both. Each announces that its own is free and expects the bytes, and copies when the
// other's does, too. Between two meetings at a stage there is one at another stage, of K or V, to which the other CTA comes
// only after it has seen the first: so `ready` is never two phases ahead. (Seeds take K alone, but short requests, which
// have them, are not paired.)
template <int STAGES>
struct Meetings {
  uint64_t (&ready)[STAGES];  // at each the other's loading warps arrive
  uint32_t parities = 0;      // of the next meetings, a bit each

  FS_DEVICE explicit Meetings(uint64_t (&ready)[STAGES]) : ready(ready) {}

  FS_DEVICE void meet(int stage, bool announces) {
    const uint32_t barrier = shared_address(&ready[stage]);
    if (announces) mbarrier_arrive_there(at_other(barrier));
    mbarrier_wait(barrier, parities >> stage & 1);
    parities ^= 1u << stage;
  }
};

// Which other request has most in common with one: of the same root, or the same tokens under another one.
#include <algorithm>
#include <array>
#include <iterator>

#include "manager.h"

namespace kvc {

namespace {

// Where media or embeddings of a hash unit differ first: theirs, or the unit's begin where that lies before. INT64_MAX: nowhere.
int64_t first_extra(const Content& a, const Content& b, int64_t begin, int64_t end) {
    const auto within = [&](const std::vector<Media>& media) {
        const auto first =
            std::ranges::upper_bound(media, begin, {}, [](const Media& m) { return m.offset + m.length; });
        return std::span(first, std::ranges::lower_bound(first, media.end(), end, {}, &Media::offset));
    };
    const auto own = within(a.media), others = within(b.media);
    const auto [x, y] = std::ranges::mismatch(own, others);
    int64_t at = INT64_MAX;
    if (x != own.end()) at = std::min(at, x->offset);
    if (y != others.end()) at = std::min(at, y->offset);
    return at == INT64_MAX ? at : std::max(at, begin);
}

}  // namespace

// Requests that were there when the request was looked up.
template <typename Visit>
void Manager::each_other(const Request& r, Visit&& visit) const {
    const auto known = [&](const Content& other) { return other.order <= r.losses.order && other.handle != r.handle; };
    history_.each([&](const Content& content) {
        if (known(content)) visit(Sibling{&content, nullptr, 0, {}});
    });
    for (const Slot& slot : slots_)
        if (slot.request && known(*slot.request)) visit(Sibling{slot.request.get(), slot.request.get(), 0, {}});
}

// Of two contents of one root, or of two lists of foreign keys, whose first `links` links are equal and no more.
Manager::Difference Manager::difference(const Request& r, const Content& other, int64_t links) const {
    const int64_t begin = links * unit_, end = std::min(r.losses.tokens(), other.n_tokens);
    if (r.foreign) {
        const auto told = std::min(std::ssize(r.digests), std::ssize(other.digests));
        return {links < std::min(told, end / unit_) ? Difference::kTokens : Difference::kEnd, begin};
    }
    const int64_t last = std::min(end, begin + unit_);
    const auto first = r.tokens.begin() + begin;
    const int64_t at =
        std::mismatch(first, r.tokens.begin() + last, other.tokens.begin() + begin).first - r.tokens.begin();
    const int64_t extra = first_extra(r, other, begin, begin + unit_);
    if (extra < end && extra < at) return {Difference::kExtra, extra};
    return {at < last ? Difference::kTokens : Difference::kEnd, at};
}

// Up to where both have the same tokens, which they have up to `begin`.
int64_t Manager::equal_tokens(const Request& r, const Content& other, int64_t begin) {
    const auto first = r.tokens.begin() + begin;
    const auto last = r.tokens.begin() + std::min(r.losses.tokens(), other.n_tokens);
    return std::mismatch(first, last, other.tokens.begin() + begin).first - r.tokens.begin();
}

// Links are chained, so two that are equal tell that all before them are: a binary search. The first `known` are.
int64_t Manager::common_links(const Request& r, const Content& other, int64_t known) const {
    const int64_t most = std::min({r.losses.tokens() / unit_, std::ssize(r.digests), std::ssize(other.digests)});
    const auto equal = [&](int64_t link) {
        return r.digests[static_cast<size_t>(link)] == other.digests[static_cast<size_t>(link)];
    };
    int64_t low = std::min(known, most), high = most;  // `low` are equal, no more than `high`
    if (low < high && !equal(low)) return low;
    if (low < high && equal(high - 1)) return high;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (equal(middle)) low = middle + 1;
        else high = middle;
    }
    return low;
}

// What the other one had computed, and lost its hold of, by then.
int64_t Manager::computed_before(const Sibling& other, uint64_t tick) {
    const Content& content = *other.content;
    const bool ended = content.started && content.started < content.ended && content.ended < tick;
    return ended ? content.reached : 0;
}

// The request of the same root with most in common. Of several: one of which more of that was computed, that was open then, of
// the same session, the newest. `running`: of those alone that held pages when the request was looked up. `differing`: the
// first in that order that goes on with something else, if it has as much in common.
Manager::Sibling Manager::longest_common(const Request& r, bool running, Sibling* differing) const {
    Sibling best;
    const auto position = [](const Sibling& s) { return s.content ? s.difference.position : -1; };
    const auto before = [&](const Sibling& a, const Sibling& b) {
        const auto rank = [&](const Sibling& s) {
            return std::array<int64_t, 5>{s.difference.position,
                                          std::min(computed_before(s, r.losses.tick), s.difference.position),
                                          !s.content->closed || s.content->closed > r.losses.tick,
                                          r.session && s.content->session == r.session, s.content->order};
        };
        return b.content && (!a.content || rank(a) < rank(b));
    };
    each_other(r, [&](Sibling other) {
        const Content& content = *other.content;
        if (!content.shares_root(r) || (running && !content.ran_at(r.losses.tick))) return;
        const auto known = static_cast<size_t>(best.links);
        if (known && (content.digests.size() < known || content.digests[known - 1] != r.digests[known - 1])) return;
        other.links = common_links(r, content, best.links);
        other.difference = difference(r, content, other.links);
        const bool goes_on = other.difference.kind != Difference::kEnd;
        if (differing && goes_on && before(*differing, other)) *differing = other;
        if (before(best, other)) best = other;
    });
    if (differing && position(*differing) < position(best)) *differing = {};
    return best;
}

// The request of another root that had most of the same tokens (or foreign keys) computed, if that goes beyond.
Manager::Sibling Manager::longest_under_another_root(const Request& r, int64_t beyond) const {
    Sibling best;
    each_other(r, [&](Sibling other) {
        const Content& content = *other.content;
        const int64_t computed = std::max(content.reached, other.open ? other.open->settled() : 0);
        if (content.foreign != r.foreign || content.shares_root(r) || !content.started ||
            content.started > r.losses.tick || computed <= beyond)
            return;
        int64_t common;
        if (r.foreign) {
            common = common_links(r, content, 0) * unit_;
        } else {
            const int64_t end = std::min(r.losses.tokens(), content.n_tokens);
            if (end <= beyond || r.tokens[static_cast<size_t>(beyond)] != content.tokens[static_cast<size_t>(beyond)])
                return;
            const auto begin = r.tokens.begin();
            common = std::mismatch(begin, begin + end, content.tokens.begin()).first - begin;
        }
        common = std::min(common, computed);
        if (common <= beyond) return;
        beyond = common;
        other.difference.position = common;
        best = other;
    });
    return best;
}

}  // namespace kvc

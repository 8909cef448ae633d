package redlock

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	shortestTurn = 100 * time.Millisecond
	// A longer wait could not be added to a moment.
	longestWait = 100 * 365 * 24 * time.Hour
	// The first request of a wait is short, so that the place in line is soon known.
	firstTurn = time.Second
	// The end of a timeout in which no answer waits any more: a tenth of it, and at most this.
	lastAnswer = 500 * time.Millisecond
	// For one request to acquire, in addition to its wait.
	oneAcquisition = 5 * time.Second
	// How long to ask for a lock that no gateway decides about, also without a wait.
	undecided = 5 * time.Second
	// The margin at the end of a lease, for work to stop, is a tenth of the TTL, and at most this.
	longestMargin = 2 * time.Second
)

// Option changes how a lock is acquired.
type Option func(*request)

type request struct {
	ttl, wait, margin, timeout time.Duration
	atLeast                    time.Duration
	hasMargin, hasTimeout      bool
	owner                      string
	priority                   *int32
	queue                      *api.AcquireBodyQueue
	slots, take                *int32
	metadata                   map[string]string
	onWaiting                  func(Waiting)
}

// TTL is how long the lock outlives its holder: 30 s by default, in whole milliseconds. The guard
// extends it long before. The gateway has limits (by default 10 ms to 5 minutes).
func TTL(ttl time.Duration) Option {
	return func(r *request) { r.ttl = ttl }
}

// Wait is how long to wait for the lock while somebody else holds it. By default 0: [Client.Lock]
// returns at once. A wait of more than a second is split into several requests. They stay at one
// gateway while it answers, and it keeps the place in line between them.
func Wait(wait time.Duration) Option {
	return func(r *request) { r.wait = wait }
}

// Timeout is how long the whole acquisition may take, with its wait, and with tries at gateways that
// do not answer. By default there is no limit but the wait and the time of several tries.
func Timeout(timeout time.Duration) Option {
	return func(r *request) { r.timeout, r.hasTimeout = timeout, true }
}

// OnWaiting is called while the acquisition waits, with the place in line and the holder: after a
// second, and then after each request. The goroutine of [Client.Lock] calls it, so it has to return
// soon: the gateway keeps the place for some seconds only.
func OnWaiting(told func(Waiting)) Option {
	return func(r *request) { r.onWaiting = told }
}

// Owner is a label for people, shown to anybody who asks for the holder. By default it is
// "user@host:pid program"; an empty label sends none.
func Owner(label string) Option {
	return func(r *request) { r.owner = label }
}

// Metadata is stored beside the lock, for people.
func Metadata(metadata map[string]string) Option {
	return func(r *request) { r.metadata = maps.Clone(metadata) }
}

// Margin is how long before its deadline a lock that could not be extended counts as lost. Set it
// to the time that your work needs to stop, less than half of the TTL. By default a tenth of the
// TTL, at most 2 s.
func Margin(margin time.Duration) Option {
	return func(r *request) { r.margin, r.hasMargin = margin, true }
}

// AtLeast is how long nobody else gets the lock, counted from its grant, even if the guard releases
// it earlier. So a job runs once although the clocks of its hosts differ. At most the longest TTL of
// the gateway.
func AtLeast(atLeast time.Duration) Option {
	return func(r *request) { r.atLeast = atLeast }
}

// Priority is how early the request is served while it waits: 0 to 9, and 9 is served first. The
// default of the gateway is 5.
func Priority(priority int) Option {
	return func(r *request) { r.priority = number(priority) }
}

// Slots is how many may hold the lock at once: 1 to 256, for example the size of a pool. Everybody
// should give the same number, because the largest one in use is the bound. Without Slots the lock
// has one holder.
func Slots(slots int) Option {
	return func(r *request) { r.slots = number(slots) }
}

// Take is how many of the [Slots] this acquisition takes, all or none: by default 1.
func Take(take int) Option {
	return func(r *request) { r.take = number(take) }
}

// QueueMode says which requests for a lock may wait at the same time.
type QueueMode string

const (
	// QueueAll lets every request wait: the default.
	QueueAll QueueMode = "all"
	// QueueNewest lets only the newest request with this value wait.
	QueueNewest QueueMode = "newest"
)

// Queue is which requests for the lock wait at the same time. With [QueueNewest], a newer request of
// this kind ends the wait with a [*RefusedError] whose code is superseded.
func Queue(mode QueueMode) Option {
	return func(r *request) { r.queue = pointerTo(api.AcquireBodyQueue(mode)) }
}

// Lock acquires the lock, and keeps it until [Guard.Release]. Without a release it is extended
// until the process ends.
//
// If ctx ends before the answer, the request leaves the queue. Afterwards the end of ctx ends the
// guard's context, but not the guard. To limit only the wait, use [Wait].
//
// Lock returns one of these errors: a [*HeldError]; a [*RefusedError], whose text says what is
// allowed; an [*UnavailableError]; a [*SetupError]; or the error of ctx.
func (c *Client) Lock(ctx context.Context, name string, options ...Option) (*Guard, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	r := requestOf(options)
	return c.lock(ctx, single{name, r.slots, r.take}, r)
}

// LockSet acquires 1 to 32 locks, all together or none of them, and keeps them until
// [Guard.Release]. It holds none of them while it waits, so sets that overlap cannot deadlock, in any
// order of names. The guard has one token and one fencing token for all locks.
//
// [Queue], [Slots] and [Take] are for a single lock. Otherwise the options and the errors are those
// of [Client.Lock]. A [*HeldError] has the held lock in Held.
func (c *Client) LockSet(ctx context.Context, names []string, options ...Option) (*Guard, error) {
	locks, r := set(slices.Clone(names)), requestOf(options)
	if r.queue != nil || r.slots != nil || r.take != nil {
		return nil, &SetupError{about(label(locks), "Queue, Slots and Take are for a single lock, and not for a set")}
	}
	return c.lock(ctx, locks, r)
}

func requestOf(options []Option) request {
	r := request{ttl: 30 * time.Second, owner: defaultOwner()}
	for _, option := range options {
		option(&r)
	}
	return r
}

func (c *Client) lock(ctx context.Context, target target, r request) (*Guard, error) {
	refused := func(format string, values ...any) error {
		return &SetupError{about(label(target), fmt.Sprintf(format, values...))}
	}
	if !r.hasMargin {
		r.margin = min(r.ttl/10, longestMargin)
	} else if r.margin < 0 || r.margin >= r.ttl-r.margin {
		return nil, refused("the margin is %v; it has to be 0 or more, and less than half of the TTL of %v", r.margin, r.ttl)
	}
	if r.wait < 0 {
		return nil, refused("the wait is %v; it has to be 0 or more", r.wait)
	}
	if r.hasTimeout && r.timeout <= 0 {
		return nil, refused("the timeout is %v; it has to be more than 0", r.timeout)
	}
	lease, sent, err := c.acquire(ctx, target, r)
	if err != nil {
		return nil, err
	}
	return newGuard(ctx, c, target, r, lease, sent), nil
}

func checkName(name string) error {
	// Such a name would change the path of the URL, and the gateway could not refuse it.
	if name == "" || name == "." || name == ".." {
		return &SetupError{fmt.Sprintf("%q is not a name of a lock: it would change the path of the URL", name)}
	}
	return nil
}

// WithLock runs work under the lock. A loss cancels the context of work, and [context.Cause] is
// then a [*LostError]. The lock is released when work has ended, also by a panic.
//
// WithLock returns the error of work. If work ended after the loss, the error is a [*LostError]
// that also wraps the error of work, even if work did not notice the loss. If the lock is not
// acquired, the errors are those of [Client.Lock].
func (c *Client) WithLock(
	ctx context.Context, name string, work func(ctx context.Context, guard *Guard) error, options ...Option,
) error {
	guard, err := c.Lock(ctx, name, options...)
	if err != nil {
		return err
	}
	return guard.during(ctx, work)
}

// WithLockSet runs work under a set of locks: [Client.WithLock] with the locks of [Client.LockSet].
func (c *Client) WithLockSet(
	ctx context.Context, names []string, work func(ctx context.Context, guard *Guard) error, options ...Option,
) error {
	guard, err := c.LockSet(ctx, names, options...)
	if err != nil {
		return err
	}
	return guard.during(ctx, work)
}

// during runs the work, and releases the guard.
func (g *Guard) during(ctx context.Context, work func(ctx context.Context, guard *Guard) error) error {
	defer func() {
		// The work was done under the lock, so a failed release is no error. The lock ends with its
		// TTL.
		if err := g.Release(context.WithoutCancel(ctx)); err != nil {
			written := g.client.warn("a lock was not released, and ends with its TTL", g.name, err)
			// The process may end right after this, so the line gets a moment.
			select {
			case <-written:
			case <-time.After(logLimit):
			}
		}
	}()
	err := work(g.Context(), g)
	var lost *LostError
	if !errors.As(g.Check(), &lost) || errors.Is(err, lost) {
		return err
	}
	if err == nil {
		return lost
	}
	return fmt.Errorf("%w; the work ended with: %w", lost, err)
}

// acquire returns the lease, and when the answered request was sent.
func (c *Client) acquire(ctx context.Context, target target, r request) (api.Lease, moment, error) {
	random := make([]byte, 16)
	_, _ = rand.Read(random) // It never fails.
	// All repetitions use the same key, so each answer is about the same grant, and all turns of a
	// wait have the same place in line.
	key := hex.EncodeToString(random)
	unsettled := false
	route, place := c.newRoute(), &place{client: c, name: label(target)}
	end := moment(math.MaxInt64)
	if r.timeout > 0 {
		end = now().add(min(r.timeout, longestWait))
	}
	lease, sent, err := c.granted(ctx, target, r, key, &unsettled, route, place, end)
	switch {
	case err == nil:
	case unsettled && ctx.Err() == nil && !end.hasPassed():
		// The lock may have been granted, and nobody has the token. That holds after lock_held too:
		// a gateway that still works on an unanswered POST may grant the lock when its holder
		// releases it. The release is safe, because it takes only grants of this key.
		c.releaseByKey(ctx, target, key, route)
	case unsettled || place.isKept:
		// The release by key also gives up the place in line.
		go c.releaseByKey(context.WithoutCancel(ctx), target, key, route)
	}
	return lease, sent, err
}

// releaseByKey releases the grants of unanswered requests with this key. Without an answer the lock
// ends with its TTL.
func (c *Client) releaseByKey(ctx context.Context, target target, key string, route *route) {
	_, _ = c.ask(ctx, question{
		name:  label(target),
		route: route,
		send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
			return target.release(ctx, gateway, nil, &key)
		},
		read:   target.readReleased(),
		until:  now().add(oneRelease),
		oneTry: oneRelease,
	})
}

// granted sets unsettled if a POST may have been granted the lock, and its lease is of no use.
func (c *Client) granted(
	ctx context.Context, target target, r request, key string, unsettled *bool, route *route, place *place, end moment,
) (api.Lease, moment, error) {
	var lease api.Lease
	name := label(target)
	wait := min(r.wait, longestWait)
	if r.timeout > 0 {
		wait = min(wait, r.timeout-min(r.timeout/10, lastAnswer))
	}
	endOfWait := now().add(wait)
	longest, first := c.turn, firstTurn
	giveUp := max(now().add(undecided), endOfWait).
		add((min(longest, wait) + oneAcquisition) * time.Duration(len(c.gateways)))
	giveUp = min(giveUp, end)
	for !giveUp.hasPassed() {
		asked := now()
		turn := min(endOfWait.left(), longest, first)
		body := api.AcquireBody{TTLMs: count(r.ttl), WaitMs: count(turn), Metadata: r.metadata}
		body.Priority, body.Queue, body.Slots, body.Take = r.priority, r.queue, r.slots, r.take
		if r.atLeast > 0 {
			body.HoldAtLeastMs = count(r.atLeast)
		}
		if r.owner != "" {
			body.Owner = &r.owner
		}
		sent, err := c.ask(ctx, question{
			name: name,
			send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
				return target.acquire(ctx, gateway, key, body)
			},
			read:      readLease(&lease),
			until:     giveUp,
			oneTry:    turn + oneAcquisition,
			hope:      endOfWait,
			route:     route,
			unsettled: unsettled,
		})
		var refused *RefusedError
		switch {
		case err == nil:
			if _, deadline := validity(lease.ValidityMs, lease.ElapsedMs, sent, r.ttl); !deadline.hasPassed() {
				return lease, sent, nil
			}
			// The answer took longer than the lock lives. The next request extends the lock, or
			// gets a new grant.
			*unsettled = true
		case !errors.As(err, &refused):
			return lease, sent, err
		case refused.Code == "invalid_wait" && longest > shortestTurn:
			longest = max(turn/2, shortestTurn)
		case refused.Code != "lock_held":
			return lease, sent, err
		default:
			first = longest
			place.refused(strings.TrimSuffix(c.gateways[route.at].Server, "/"), refused.Problem)
			if endOfWait.hasPassed() {
				return lease, sent, &HeldError{Name: name, Problem: refused.Problem}
			}
			if r.onWaiting != nil {
				r.onWaiting(place.last)
			}
			if now().since(asked) >= turn/2 {
				break
			}
			// The answer came before the requested wait was over. Pause before the next request.
			pause := refused.RetryAfter
			if pause == 0 {
				pause = time.Second
			}
			if !sleep(ctx, min(pause, endOfWait.left())) {
				return lease, sent, ended(ctx)
			}
		}
	}
	return lease, 0, &UnavailableError{Name: name, What: []string{"answers took longer than the lock lives"}}
}

// validity returns how long a lease may be trusted, and until when. sent is when the request was
// sent. Time on the network counts against the validity. Time in the gateway does not, because the
// gateway computes the validity afterwards. An answer with more than ttl, or with more elapsed time
// than has passed, is cut to these.
func validity(validityMs int32, elapsedMs int64, sent moment, ttl time.Duration) (time.Duration, moment) {
	elapsed := min(milliseconds(elapsedMs), now().since(sent))
	trusted := min(milliseconds(int64(validityMs)), ttl)
	return trusted, sent.add(elapsed + trusted)
}

// count converts to milliseconds.
func count(d time.Duration) *int32 {
	return number(d.Milliseconds())
}

// number cuts a value that does not fit; the gateway refuses it as beyond its limits.
func number[T int | int64](value T) *int32 {
	return pointerTo(int32(min(max(int64(value), math.MinInt32), math.MaxInt32)))
}

func pointerTo[T any](value T) *T {
	return &value
}

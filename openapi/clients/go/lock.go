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
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	shortestTurn = 100 * time.Millisecond
	// Beside its wait, for one request to acquire.
	oneAcquisition = 5 * time.Second
	// For how long a lock is asked for that nobody decides on, also without a wait.
	undecided = 5 * time.Second
	// The end of a lease that is left for whoever has to stop: a tenth of the TTL, and no more than this.
	longestMargin = 2 * time.Second
)

// Option is how a lock is acquired.
type Option func(*request)

type request struct {
	ttl, wait, margin time.Duration
	hasMargin         bool
	owner             string
	metadata          map[string]string
}

// TTL is for how long the lock outlives its holder: 30 s unless this says otherwise. It is extended long before. Whole
// milliseconds; the gateway has limits (by default 10 ms to 5 minutes).
func TTL(ttl time.Duration) Option {
	return func(r *request) { r.ttl = ttl }
}

// Wait is how long to wait for the lock while somebody else holds it, 0 by default: whoever is refused is told at once. It may be
// longer than the gateway allows: it is asked for in turns, and each turn stands at the end of the queue.
func Wait(wait time.Duration) Option {
	return func(r *request) { r.wait = max(0, wait) }
}

// Owner is a label for people: shown to whoever asks who holds the lock.
func Owner(label string) Option {
	return func(r *request) { r.owner = label }
}

// Metadata is stored beside the lock, for people.
func Metadata(metadata map[string]string) Option {
	return func(r *request) { r.metadata = maps.Clone(metadata) }
}

// Margin is how long before its deadline a lock that could not be extended is given up for lost: as long as work takes to stop.
// A tenth of the TTL by default, 2 s at most; it has to be less than half of the TTL.
func Margin(margin time.Duration) Option {
	return func(r *request) { r.margin, r.hasMargin = margin, true }
}

// Lock acquires the lock, and keeps it until [Guard.Release]. Call that, or it is extended until the process ends.
//
// When ctx ends before there is an answer, the queue is left. Afterwards ctx ends the guard's context, but not the guard. To
// bound the waiting alone, use [Wait].
//
// The error is a [*HeldError], a [*RefusedError] with what is allowed, an [*UnavailableError], a [*SetupError], or that of ctx.
func (c *Client) Lock(ctx context.Context, name string, options ...Option) (*Guard, error) {
	r := request{ttl: 30 * time.Second}
	for _, option := range options {
		option(&r)
	}
	// What a client would take for steps through the path does not reach the gateway that could refuse it.
	if name == "" || name == "." || name == ".." {
		return nil, &SetupError{fmt.Sprintf("%q is no name of a lock: paths of URLs end there", name)}
	}
	if !r.hasMargin {
		r.margin = min(r.ttl/10, longestMargin)
	} else if r.margin < 0 || r.margin >= r.ttl-r.margin {
		return nil, &SetupError{fmt.Sprintf("the margin of %v has to be 0 or more, and less than half of the TTL of %v", r.margin, r.ttl)}
	}
	lease, sent, err := c.acquire(ctx, name, r)
	if err != nil {
		return nil, err
	}
	return newGuard(ctx, c, name, r, lease, sent), nil
}

// WithLock runs work under the lock. Its context is cancelled when the lock is lost; [context.Cause] is a [*LostError] then. The
// lock is released when work has ended, also by a panic.
//
// It returns what work returned. Work that ended after the loss is reported as lost even if it did not look: the error is
// a [*LostError] then, and has the one of work beside it. What keeps the lock from being acquired is told as by [Client.Lock].
func (c *Client) WithLock(
	ctx context.Context, name string, work func(ctx context.Context, guard *Guard) error, options ...Option,
) error {
	guard, err := c.Lock(ctx, name, options...)
	if err != nil {
		return err
	}
	defer func() {
		// Whatever becomes of the release, the work was done under the lock, which ends with its TTL.
		if err := guard.Release(context.WithoutCancel(ctx)); err != nil {
			c.log.Warn("a lock was not released, and ends with its TTL", "name", name, "error", err)
		}
	}()
	err = work(guard.Context(), guard)
	var lost *LostError
	if !errors.As(guard.Check(), &lost) || errors.Is(err, lost) {
		return err
	}
	if err == nil {
		return lost
	}
	return fmt.Errorf("%w; the work ended with: %w", lost, err)
}

// acquire says what was granted, and when the request was sent that was answered.
func (c *Client) acquire(ctx context.Context, name string, r request) (api.Lease, moment, error) {
	random := make([]byte, 16)
	_, _ = rand.Read(random) // It never fails.
	// The same for all repetitions: whichever is answered tells of the same grant.
	key := hex.EncodeToString(random)
	lease, sent, err := c.granted(ctx, name, r, key)
	var refused *RefusedError
	var held *HeldError
	if err != nil && !errors.As(err, &refused) && !errors.As(err, &held) {
		// It may have been granted, and nobody has the token.
		if ctx.Err() != nil {
			go c.releaseByKey(context.WithoutCancel(ctx), name, key)
		} else {
			c.releaseByKey(ctx, name, key)
		}
	}
	return lease, sent, err
}

// releaseByKey releases what requests with this key were granted that were not answered. When nobody answers now either, the
// lock ends with its TTL.
func (c *Client) releaseByKey(ctx context.Context, name string, key string) {
	_, _ = c.ask(ctx, question{
		send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
			return gateway.ReleaseLock(ctx, name, &api.ReleaseLockParams{IdempotencyKey: &key})
		},
		until:  now().add(oneRelease),
		oneTry: oneRelease,
	})
}

func (c *Client) granted(ctx context.Context, name string, r request, key string) (api.Lease, moment, error) {
	var lease api.Lease
	params := api.AcquireLockParams{IdempotencyKey: &key}
	endOfWait := now().add(r.wait)
	longest := c.turn
	giveUp := max(now().add(undecided), endOfWait).
		add((min(longest, r.wait) + oneAcquisition) * time.Duration(len(c.gateways)))
	for !giveUp.hasPassed() {
		asked := now()
		turn := min(endOfWait.left(), longest)
		body := api.AcquireBody{TTLMs: count(r.ttl), WaitMs: count(turn), Metadata: r.metadata}
		if r.owner != "" {
			body.Owner = &r.owner
		}
		sent, err := c.ask(ctx, question{
			send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
				return gateway.AcquireLock(ctx, name, &params, body)
			},
			answer: &lease,
			until:  giveUp,
			oneTry: turn + oneAcquisition,
		})
		var refused *RefusedError
		switch {
		case err == nil:
			if _, deadline := validity(lease, sent, r.ttl); !deadline.hasPassed() {
				return lease, sent, nil
			}
			// The answer was on its way for longer than the lock lives. Asked again, it is extended or granted anew.
		case !errors.As(err, &refused):
			return lease, sent, err
		case refused.Code == "invalid_wait" && longest > shortestTurn:
			longest = max(turn/2, shortestTurn)
		case refused.Code != "lock_held":
			return lease, sent, err
		case endOfWait.hasPassed():
			return lease, sent, &HeldError{Name: name, Problem: refused.Problem}
		case now().since(asked) < turn/2:
			// Answered before its turn was over: not to be asked again at once.
			pause := refused.RetryAfter
			if pause == 0 {
				pause = time.Second
			}
			if !sleep(ctx, min(pause, endOfWait.left())) {
				return lease, sent, ended(ctx)
			}
		}
	}
	return lease, 0, &UnavailableError{What: []string{"answers took longer than the lock lives"}}
}

// validity is for how long a lease may be trusted, and until when, if it was asked for then. What was on the way is lost, what was
// spent in the gateway is not: the validity was counted afterwards. No answer is believed that says more than can be.
func validity(lease api.Lease, sent moment, ttl time.Duration) (time.Duration, moment) {
	elapsed := min(milliseconds(int64(lease.ElapsedMs)), now().since(sent))
	trusted := min(milliseconds(int64(lease.ValidityMs)), ttl)
	return trusted, sent.add(elapsed + trusted)
}

// count is in milliseconds; what does not fit is beyond all limits of a gateway, which says so.
func count(d time.Duration) *int32 {
	return pointerTo(int32(min(max(d.Milliseconds(), math.MinInt32), math.MaxInt32)))
}

func pointerTo[T any](value T) *T {
	return &value
}

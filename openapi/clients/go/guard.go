package redlock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	// One try to extend takes a quarter of the remaining time, so that a hung gateway cannot use up
	// the lease, and at most longestTry.
	longestTry  = 5 * time.Second
	shareOfATry = 4
	oneRelease  = 2 * time.Second
	// How long a release is tried at least, also after the deadline.
	leastRelease = time.Second
	// How long a release is tried at most. Finished work does not wait longer; the lock then ends
	// with its TTL.
	longestRelease = 5 * time.Second
	// The detail of a loss if no extension has failed before.
	unanswered = "none was answered in time"
)

// Guard is a held lock, or a held set of locks. It extends the lock in the background and reports
// its loss. Of a set it extends all locks by one request, and the set is lost with any of them.
// Several goroutines may use it.
type Guard struct {
	client       *Client
	target       target
	name         string
	token        string
	fencingToken int64
	slotsHeld    []int32
	ttl          time.Duration
	margin       time.Duration
	// The context of the work.
	context context.Context
	cancel  context.CancelCauseFunc
	lost    chan struct{}
	// Ends the goroutines.
	stop  context.CancelFunc
	ended sync.WaitGroup

	// One release at a time.
	releasing sync.Mutex
	isDone    bool

	state      sync.Mutex
	validity   time.Duration
	deadline   moment
	heard      string
	waiters    *int64
	loss       *LostError
	isReleased bool
}

func newGuard(ctx context.Context, client *Client, target target, r request, lease api.Lease, sent moment) *Guard {
	guard := &Guard{
		client:       client,
		target:       target,
		name:         label(target),
		token:        lease.Token,
		fencingToken: int64(lease.FencingToken),
		slotsHeld:    lease.SlotsHeld,
		ttl:          r.ttl,
		margin:       r.margin,
		lost:         make(chan struct{}),
		heard:        unanswered,
	}
	guard.validity, guard.deadline = validity(lease.ValidityMs, lease.ElapsedMs, sent, r.ttl)
	guard.context, guard.cancel = context.WithCancelCause(ctx)
	// Work may go on after its context has ended, so the lock is kept until the release.
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	guard.stop = stop
	guard.ended.Add(2)
	go func() {
		defer guard.ended.Done()
		guard.extendUntilLost(life)
	}()
	go func() {
		defer guard.ended.Done()
		guard.loseInTime(life)
	}()
	return guard
}

// Name returns the name of the lock. For a set it has all names, separated by commas.
func (g *Guard) Name() string {
	return g.name
}

// Names returns the names of the locks: one, or those of the set.
func (g *Guard) Names() []string {
	return slices.Clone(g.target.names())
}

// Token returns the secret that extends and releases the lock.
func (g *Guard) Token() string {
	return g.token
}

// FencingToken returns a number larger than that of every earlier grant of this lock; below 2^53.
// Give it to the resource with every write, and let the resource refuse smaller tokens:
//
//	UPDATE … SET …, fence = $1 WHERE id = $2 AND fence <= $1
func (g *Guard) FencingToken() int64 {
	return g.fencingToken
}

// SlotsHeld returns the numbers of the slots that the guard holds, from 1; nil for a lock without
// [Slots]. No other holder has these numbers, so they may name what the holder uses, such as a port.
func (g *Guard) SlotsHeld() []int {
	var slots []int
	for _, slot := range g.slotsHeld {
		slots = append(slots, int(slot))
	}
	return slots
}

// Left returns how long the lock is still ours, unless somebody takes it away by force; 0 if it is
// lost or released. It grows with each extension.
func (g *Guard) Left() time.Duration {
	if g.Check() != nil {
		return 0
	}
	_, deadline := g.lease()
	return deadline.left()
}

// Waiters returns how many waited for the lock at the gateway at the last extension, and false
// before it. A holder may release the lock early when somebody waits. Those who wait for any lock of
// a set count.
func (g *Guard) Waiters() (int64, bool) {
	g.state.Lock()
	defer g.state.Unlock()
	if g.waiters == nil {
		return 0, false
	}
	return *g.waiters, true
}

// Context returns a child of the context of [Client.Lock]. It is cancelled when the lock is lost or
// released: [context.Cause] is a [*LostError] or [ErrReleased]. Use it for the work.
func (g *Guard) Context() context.Context {
	return g.context
}

// Lost returns a channel that is closed on a loss, at the latest the margin before the deadline.
// [Guard.Check] returns the reason.
func (g *Guard) Lost() <-chan struct{} {
	return g.lost
}

// Check returns nil while the lock is ours. It compares the clock too, so it is right after a pause
// of the whole process. Otherwise it returns a [*LostError] or [ErrReleased].
func (g *Guard) Check() error {
	g.state.Lock()
	defer g.state.Unlock()
	switch {
	case g.loss != nil:
		return g.loss
	case g.isReleased:
		return ErrReleased
	case g.deadline.hasPassed():
		return &LostError{Name: g.name, Reason: Unconfirmed, Detail: "no code ran until the deadline had passed"}
	}
	return nil
}

// Release cancels the guard's context and releases the lock, trying for 5 s at most. It returns nil
// if the lock is no longer held, and if it is called again; call [Guard.Check] before. If ctx has
// ended already, Release still asks the gateways for 2 s, so that a deferred release frees the lock
// of a cancelled request too.
//
// The error is a [*RefusedError], an [*UnavailableError], or that of ctx: no gateway confirmed the
// release, and the lock ends with its TTL.
func (g *Guard) Release(ctx context.Context) error {
	g.state.Lock()
	g.isReleased = true
	deadline := g.deadline
	g.state.Unlock()
	// Work stops before somebody else can be granted the lock.
	g.cancel(ErrReleased)
	g.stop()
	g.ended.Wait()

	g.releasing.Lock()
	defer g.releasing.Unlock()
	if g.isDone {
		return nil
	}
	until := min(max(deadline, now().add(leastRelease)), now().add(longestRelease))
	if ctx.Err() != nil {
		ctx = context.WithoutCancel(ctx)
		until = min(until, now().add(oneRelease))
	}
	_, err := g.client.ask(ctx, question{
		name: g.name,
		send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
			return g.target.release(ctx, gateway, &g.token, nil)
		},
		read:   g.target.readReleased(),
		until:  until,
		oneTry: oneRelease,
	})
	// A repeated request may find that the first one has released the lock.
	var refused *RefusedError
	if errors.As(err, &refused) && refused.isLoss() {
		err = nil
	}
	g.isDone = err == nil
	return err
}

func (g *Guard) lease() (time.Duration, moment) {
	g.state.Lock()
	defer g.state.Unlock()
	return g.validity, g.deadline
}

// extendUntilLost extends the lock, and reports a loss that a gateway reports.
func (g *Guard) extendUntilLost(ctx context.Context) {
	for {
		validity, deadline := g.lease()
		interval := validity / 3
		r := &renewal{
			guard:    g,
			ctx:      ctx,
			interval: interval,
			due:      deadline.add(-2 * interval),
			giveUp:   deadline.add(-g.margin),
			decided:  make(chan bool, 1),
		}
		isDecided := false
		if _, isSet := g.target.(set); isSet {
			// A set has a request of its own.
			r.due.reached(ctx)
		} else {
			isDecided = g.client.together.wait(r)
		}
		if ctx.Err() != nil || !isDecided && !g.extend(ctx, r.giveUp) {
			return
		}
	}
}

// extend returns false if the lock can no longer be extended.
func (g *Guard) extend(ctx context.Context, giveUp moment) bool {
	for {
		left := giveUp.left()
		if left < shortestTry {
			// loseInTime reports the loss.
			return false
		}
		var leases []api.Lease
		sent, err := g.client.ask(ctx, question{
			name: g.name,
			send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
				return g.target.extend(ctx, gateway, g.token, g.ttl)
			},
			read:   g.target.readExtended(&leases),
			until:  giveUp,
			oneTry: limitOfATry(left),
			heard:  g.hear,
		})
		var refused *RefusedError
		switch {
		case err == nil:
			if g.extended(validityOfAll(leases, sent, g.ttl)) {
				return true
			}
			g.hear("an extension was confirmed for no longer than before")
		case ctx.Err() != nil:
			return false
		case errors.As(err, &refused) && refused.isLoss():
			g.lose(refused.asLoss(refused.Name))
			return false
		case refused != nil:
			// For example an expired key. The lock is ours until its deadline; the cause may be
			// fixed by then.
			g.hear(refused.Problem.String())
		}
		if !sleep(ctx, min(giveUp.left()/8, longestTry)) {
			return false
		}
	}
}

// limitOfATry returns the limit for one try to extend, of the time left.
func limitOfATry(left time.Duration) time.Duration {
	return min(max(left/shareOfATry, shortestTry), longestTry)
}

// loseInTime reports the loss if the deadline has not moved in time. It does nothing else, so that
// no hanging request can delay it.
func (g *Guard) loseInTime(ctx context.Context) {
	for {
		_, deadline := g.lease()
		if !deadline.add(-g.margin).reached(ctx) {
			return
		}
		g.state.Lock()
		if g.deadline > deadline {
			g.state.Unlock()
			continue
		}
		loss := &LostError{Name: g.name, Reason: Unconfirmed, Detail: g.heard}
		isNew := g.settle(loss)
		g.state.Unlock()
		if isNew {
			g.report(loss)
		}
		return
	}
}

func (g *Guard) hear(what string) {
	g.state.Lock()
	defer g.state.Unlock()
	g.heard = what
}

// extended moves the deadline; false if it does not move. A lock that is reported lost stays lost.
func (g *Guard) extended(validity time.Duration, deadline moment, waiters *int64) bool {
	g.state.Lock()
	defer g.state.Unlock()
	g.waiters = waiters
	if g.loss != nil || deadline <= g.deadline {
		return false
	}
	g.validity, g.deadline, g.heard = validity, deadline, unanswered
	return true
}

func (g *Guard) lose(loss *LostError) {
	g.state.Lock()
	isNew := g.settle(loss)
	g.state.Unlock()
	if isNew {
		g.report(loss)
	}
}

// settle records the loss; false if the lock was lost or released before. The caller holds g.state.
func (g *Guard) settle(loss *LostError) bool {
	if g.loss != nil || g.isReleased {
		return false
	}
	g.loss = loss
	return true
}

func (g *Guard) report(loss *LostError) {
	g.cancel(loss)
	close(g.lost)
	g.stop()
	g.client.warn("a lock was lost", g.name, loss)
}

// String names the lock and the time to its deadline. It leaves out the token, which is a secret.
func (g *Guard) String() string {
	return fmt.Sprintf("Guard of %q, %s to its deadline", g.name, g.Left().Round(time.Millisecond))
}

// Format is String for every verb: none of them shows the token.
func (g *Guard) Format(state fmt.State, _ rune) {
	_, _ = io.WriteString(state, g.String())
}

// LogValue is what [log/slog] shows of a guard: its lock and its fencing token, without the token.
func (g *Guard) LogValue() slog.Value {
	return slog.GroupValue(slog.String("lock", g.name), slog.Int64("fencing_token", g.fencingToken))
}

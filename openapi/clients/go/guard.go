package redlock

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	// For one try to extend: a share of the time that is left, so that a hung gateway cannot eat the lease, and no more than this.
	longestTry  = 5 * time.Second
	shareOfATry = 4
	oneRelease  = 2 * time.Second
	// For how long a release is tried at least, also after the deadline.
	leastRelease = time.Second
	// And at most: work that is done is not held up for longer. The TTL does the rest.
	longestRelease = 5 * time.Second
	// What was heard of an extension before any failed.
	unanswered = "none was answered in time"
)

// Guard is a lock that is held: extended in the background, and lost out loud. It may be used by several goroutines.
type Guard struct {
	client       *Client
	name         string
	token        string
	fencingToken int64
	ttl          time.Duration
	margin       time.Duration
	// What work looks at.
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
	loss       *LostError
	isReleased bool
}

func newGuard(ctx context.Context, client *Client, name string, r request, lease api.Lease, sent moment) *Guard {
	guard := &Guard{
		client:       client,
		name:         name,
		token:        lease.Token,
		fencingToken: int64(lease.FencingToken),
		ttl:          r.ttl,
		margin:       r.margin,
		lost:         make(chan struct{}),
		heard:        unanswered,
	}
	guard.validity, guard.deadline = validity(lease, sent, r.ttl)
	guard.context, guard.cancel = context.WithCancelCause(ctx)
	// Work may go on after its context has ended, and the lock is kept for it until the release.
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

// Name is the lock's.
func (g *Guard) Name() string {
	return g.name
}

// Token is the secret by which the lock is extended and released.
func (g *Guard) Token() string {
	return g.token
}

// FencingToken is larger than that of every earlier grant of this lock. Give it to the resource with every write, and let the
// resource refuse smaller ones: UPDATE … SET …, fence = $1 WHERE id = $2 AND fence <= $1. Below 2^53.
func (g *Guard) FencingToken() int64 {
	return g.fencingToken
}

// Left is for how long the lock is certainly ours, unless somebody takes it away by force; 0 when it is lost or released. It
// grows with each extension.
func (g *Guard) Left() time.Duration {
	if g.Check() != nil {
		return 0
	}
	_, deadline := g.lease()
	return deadline.left()
}

// Context is that of [Client.Lock], cancelled when the lock is lost or released: [context.Cause] is a [*LostError], or
// [ErrReleased]. Do the work with it.
func (g *Guard) Context() context.Context {
	return g.context
}

// Lost is closed when the lock is lost, at the latest the margin before its deadline. [Guard.Check] says why.
func (g *Guard) Lost() <-chan struct{} {
	return g.lost
}

// Check is nil while the lock is certainly ours, by the clock too: also where nothing has run for a while. Otherwise it is
// a [*LostError], or [ErrReleased].
func (g *Guard) Check() error {
	g.state.Lock()
	defer g.state.Unlock()
	switch {
	case g.loss != nil:
		return g.loss
	case g.isReleased:
		return ErrReleased
	case g.deadline.hasPassed():
		return &LostError{Name: g.name, Reason: Unconfirmed, Detail: "nothing has run since"}
	}
	return nil
}

// Release cancels the guard's context, releases the lock, and tries for 5 s at most. It is quiet when the lock is not held any
// more, and when it is called again; ask [Guard.Check] before. When ctx has ended already, one gateway after the other is still
// asked for 2 s, so that a deferred release frees the lock of a cancelled request too.
//
// The error is a [*RefusedError], an [*UnavailableError], or that of ctx: no gateway has confirmed it, and the lock ends with its
// TTL.
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
		send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
			return gateway.ReleaseLock(ctx, g.name, &api.ReleaseLockParams{LockToken: &g.token})
		},
		until:  until,
		oneTry: oneRelease,
	})
	// A repetition meets what the first one did.
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

// extendUntilLost moves the deadline, and tells of a loss that a gateway tells of.
func (g *Guard) extendUntilLost(ctx context.Context) {
	for {
		validity, deadline := g.lease()
		if !deadline.add(-validity / 3 * 2).reached(ctx) {
			return
		}
		if !g.extend(ctx, deadline.add(-g.margin)) {
			return
		}
	}
}

// extend is false when there is nothing to extend any more.
func (g *Guard) extend(ctx context.Context, giveUp moment) bool {
	for {
		left := giveUp.left()
		if left < shortestTry {
			// The rest is for loseInTime.
			return false
		}
		var lease api.Lease
		sent, err := g.client.ask(ctx, question{
			send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
				return gateway.ExtendLock(
					ctx, g.name, &api.ExtendLockParams{LockToken: g.token}, api.ExtendBody{TTLMs: count(g.ttl)})
			},
			answer: &lease,
			until:  giveUp,
			oneTry: min(max(left/shareOfATry, shortestTry), longestTry),
			heard:  g.hear,
		})
		var refused *RefusedError
		switch {
		case err == nil:
			if g.extended(validity(lease, sent, g.ttl)) {
				return true
			}
			g.hear("an extension was confirmed for no longer than before")
		case ctx.Err() != nil:
			return false
		case errors.As(err, &refused) && refused.isLoss():
			g.lose(refused.asLoss(g.name))
			return false
		case refused != nil:
			// A key that has ended, say. The lock is ours until its deadline, and somebody may mend it.
			g.hear(refused.String())
		}
		if !sleep(ctx, min(giveUp.left()/8, longestTry)) {
			return false
		}
	}
}

// loseInTime tells of the loss when the deadline has not moved in time. It is alone with this, so that nothing that hangs can
// hold it up.
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
		isNews := g.settle(loss)
		g.state.Unlock()
		if isNews {
			g.tell(loss)
		}
		return
	}
}

func (g *Guard) hear(what string) {
	g.state.Lock()
	defer g.state.Unlock()
	g.heard = what
}

// extended moves the deadline; false when it does not move. What is told lost stays lost.
func (g *Guard) extended(validity time.Duration, deadline moment) bool {
	g.state.Lock()
	defer g.state.Unlock()
	if g.loss != nil || deadline <= g.deadline {
		return false
	}
	g.validity, g.deadline, g.heard = validity, deadline, unanswered
	return true
}

func (g *Guard) lose(loss *LostError) {
	g.state.Lock()
	isNews := g.settle(loss)
	g.state.Unlock()
	if isNews {
		g.tell(loss)
	}
}

// settle is false when it was lost or released before. Under the lock of the state.
func (g *Guard) settle(loss *LostError) bool {
	if g.loss != nil || g.isReleased {
		return false
	}
	g.loss = loss
	return true
}

func (g *Guard) tell(loss *LostError) {
	g.cancel(loss)
	close(g.lost)
	g.stop()
	// Apart: a log that nobody reads must hold up neither a release nor whoever waits for one.
	go g.client.log.Warn("a lock was lost", "name", g.name, "error", loss)
}

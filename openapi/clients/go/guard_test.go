package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

// A busy machine may not run a process for seconds. A lock that is extended a third of this after its
// grant outlasts more than three of them.
const ttl = 6 * time.Second

var (
	background = context.Background()
	kept       = redlock.TTL(ttl)
)

func lock(t *testing.T, client *redlock.Client, name string, options ...redlock.Option) *redlock.Guard {
	t.Helper()
	guard, err := client.Lock(background, name, options...)
	must(t, err)
	return guard
}

func lossOf(t *testing.T, err error) *redlock.LostError {
	t.Helper()
	var lost *redlock.LostError
	if !errors.As(err, &lost) {
		t.Fatalf("no loss: %v", err)
	}
	return lost
}

func TestAGuardHoldsItsLockForFiveTimesItsTTLAndLeavesNothing(t *testing.T) {
	t.Parallel()
	s := start(t)
	guard := lock(t, s.client(), "jobs/nightly", redlock.TTL(ttl), redlock.Owner("host-7"))
	for begin := guard.Deadline(); guard.Deadline()-begin < 5*ttl; {
		extended(t, guard, 1)
		status := s.look(0, "jobs/nightly")
		if *status.Owner != "host-7" || *status.FencingToken != guard.FencingToken() {
			t.Fatalf("held by %v", status)
		}
	}
	must(t, guard.Context().Err())
	must(t, guard.Release(background))
	must(t, guard.Release(background))
	if state := s.look(0, "jobs/nightly").State; state != api.LockStateFree {
		t.Fatal(state)
	}
	if guard.Check() != redlock.ErrReleased || context.Cause(guard.Context()) != redlock.ErrReleased || guard.Left() != 0 {
		t.Fatal(guard.Check())
	}
}

func TestAGuardIsToldOfTheLossWhenItsLockIsTakenAwayAndItsReleaseIsQuiet(t *testing.T) {
	t.Parallel()
	s := start(t)
	guard := lock(t, s.client(), "a", kept)
	// The other one waits at the gateway of the release, so the lock is never free in between.
	got, other := make(chan *redlock.Guard, 1), s.client(s.Gateways[1])
	go func() {
		defer close(got)
		next, err := other.Lock(background, "a", redlock.Owner("next"), redlock.Wait(patience))
		if err != nil {
			t.Error(err)
			return
		}
		got <- next
	}()
	s.awaited(1, "a")
	s.takeAway(guard)
	next := <-got
	closed(t, "the loss", guard.Lost())
	closed(t, "the context", guard.Context().Done())
	loss := lossOf(t, context.Cause(guard.Context()))
	if loss.Reason != redlock.Taken || loss.Holder != "next" || loss.Name != "a" || guard.Check() != error(loss) {
		t.Fatal(loss)
	}
	must(t, guard.Release(background))
	if lossOf(t, guard.Check()) != loss {
		t.Fatal("a release hid the loss")
	}
	must(t, next.Check())
	must(t, next.Release(background))

	guard = lock(t, s.client(), "b", kept)
	s.takeAway(guard)
	closed(t, "the loss", guard.Lost())
	if loss := lossOf(t, guard.Check()); loss.Reason != redlock.Gone {
		t.Fatal(loss)
	}
	must(t, guard.Release(background))
}

func TestAGuardWhoseMastersAreGoneIsLostBeforeItsDeadline(t *testing.T) {
	t.Parallel()
	s := start(t)
	// A busy machine may tell the test late, so the margin is long.
	const margin = 2500 * time.Millisecond
	guard := lock(t, s.client(), "a", redlock.TTL(2*ttl), redlock.Margin(margin))
	extended(t, guard, 1)
	s.do("stop-masters", map[string]int{"count": 2})
	closed(t, "the loss", guard.Lost())
	left := guard.UntilDeadline()
	s.do("continue-masters", nil)
	loss := lossOf(t, guard.Check())
	// The last try ends by the gateway's 503, or before that by the guard's own time limit.
	isNamed := strings.Contains(loss.Detail, "outcome_unknown") || strings.Contains(loss.Detail, "did not answer")
	if loss.Reason != redlock.Unconfirmed || !isNamed {
		t.Fatal(loss)
	}
	if left < 100*time.Millisecond {
		t.Fatalf("%v before the deadline; the margin is %v", left, margin)
	}
}

func TestAGuardSurvivesTheKillOfOneOfTwoGateways(t *testing.T) {
	t.Parallel()
	s := start(t)
	guard := lock(t, s.client(), "a", kept)
	s.do("kill-gateway", map[string]int{"index": 0})
	extended(t, guard, 3)
	if status := s.look(1, "a"); *status.FencingToken != guard.FencingToken() {
		t.Fatal(status)
	}
	must(t, guard.Release(background))
	lock(t, s.client(), "b").Release(background)
}

func TestAGuardSurvivesAHungGateway(t *testing.T) {
	t.Parallel()
	s := start(t)
	guard := lock(t, s.client(), "a", kept)
	s.do("stop-gateway", map[string]int{"index": 0})
	extended(t, guard, 3)
	if status := s.look(1, "a"); *status.FencingToken != guard.FencingToken() {
		t.Fatal(status)
	}
	must(t, guard.Release(background))
	s.do("continue-gateway", map[string]int{"index": 0})
}

func TestASwallowedAnswerLeadsToTheSameToken(t *testing.T) {
	t.Parallel()
	s := start(t)
	s.do("swallow", map[string]int{"count": 2})
	guard := lock(t, s.client(s.Proxy), "a", kept)
	status := s.look(0, "a")
	if status.State != api.LockStateHeld || *status.FencingToken != guard.FencingToken() {
		t.Fatal(status)
	}
	locks, err := s.plain(0).ListLocksWithResponse(background, nil)
	must(t, err)
	if len(locks.JSON200.Locks) != 1 {
		t.Fatalf("something else holds a lock: %s", locks.Body)
	}
	s.do("swallow", map[string]int{"count": 1})
	extended(t, guard, 1)
	s.do("swallow", map[string]int{"count": 1})
	must(t, guard.Release(background))
	if state := s.look(0, "a").State; state != api.LockStateFree {
		t.Fatal(state)
	}
}

func TestTwentyContendersNeverOverlapOnACounterWithoutALock(t *testing.T) {
	t.Parallel()
	const contenders, each = 20, 5
	s := start(t)
	clients := []*redlock.Client{s.client(s.Gateways[0]), s.client(s.Gateways[1])}
	// Not atomic: the race detector sees an overlap too. What the locks order, they order through another process, so it is
	// told of the order by a channel.
	counter, holders := 0, make(chan struct{}, 1)
	var all sync.WaitGroup
	for n := range contenders {
		all.Add(1)
		go func() {
			defer all.Done()
			for range each {
				err := clients[n%2].WithLock(background, "counter", func(context.Context, *redlock.Guard) error {
					select {
					case holders <- struct{}{}:
					default:
						return errors.New("two hold it")
					}
					before := counter
					runtime.Gosched()
					counter = before + 1
					<-holders
					return nil
				}, redlock.Wait(2*patience))
				if err != nil {
					t.Error(err)
				}
			}
		}()
	}
	all.Wait()
	if counter != contenders*each {
		t.Fatalf("%d of %d", counter, contenders*each)
	}
}

func TestWorkThatEndedAfterTheLossIsReportedLost(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	failed := errors.New("it failed too")
	for _, result := range []error{nil, failed} {
		err := client.WithLock(background, "a", func(_ context.Context, guard *redlock.Guard) error {
			s.takeAway(guard)
			closed(t, "the loss", guard.Lost())
			return result
		}, kept)
		if loss := lossOf(t, err); loss.Reason != redlock.Gone || !errors.Is(err, result) && result != nil {
			t.Fatal(err)
		}
	}
	// Work that looks is stopped, and says why only once.
	err := client.WithLock(background, "a", func(ctx context.Context, guard *redlock.Guard) error {
		s.takeAway(guard)
		closed(t, "the context", ctx.Done())
		return fmt.Errorf("stopped: %w", context.Cause(ctx))
	}, kept)
	if lossOf(t, err); strings.Count(err.Error(), "was lost") != 1 || !strings.HasPrefix(err.Error(), "stopped") {
		t.Fatal(err)
	}
}

func TestALockIsReleasedWhenWorkEndsHowever(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	failed := errors.New("it failed")
	err := client.WithLock(background, "a", func(context.Context, *redlock.Guard) error { return failed })
	if err != failed || s.look(0, "a").State != api.LockStateFree {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Fatal("the panic was swallowed")
			}
		}()
		_ = client.WithLock(background, "a", func(context.Context, *redlock.Guard) error { panic("it did") })
	}()
	if state := s.look(0, "a").State; state != api.LockStateFree {
		t.Fatal(state)
	}
	// The caller's end ends the work's context, and not the lock before the work.
	ctx, cancel := context.WithCancel(background)
	err = client.WithLock(ctx, "a", func(ctx context.Context, guard *redlock.Guard) error {
		cancel()
		<-ctx.Done()
		extended(t, guard, 2)
		return ctx.Err()
	}, kept)
	if !errors.Is(err, context.Canceled) || s.look(0, "a").State != api.LockStateFree {
		t.Fatal(err)
	}
	guard := lock(t, client, "a")
	must(t, guard.Release(ctx))
	if state := s.look(0, "a").State; state != api.LockStateFree {
		t.Fatal(state)
	}
}

func TestWhatTheGatewayRefusesIsToldWithWhatIsAllowed(t *testing.T) {
	t.Parallel()
	s := start(t)
	known, wrong := redlock.Config{URLs: []string{s.Keyed}, Key: s.Key}, redlock.Config{URLs: []string{s.Keyed}, Key: "rlk.no.key"}
	minute := redlock.TTL(time.Minute)
	for _, each := range []struct {
		config redlock.Config
		name   string
		option redlock.Option
		status int
		code   string
		detail string
	}{
		{wrong, "jobs/a", minute, 401, "unauthenticated", "key"},
		{known, "other/a", minute, 403, "forbidden", "acquire"},
		{known, "jobs/ä", minute, 400, "invalid_name", "A-Z"},
		{known, "jobs/a", redlock.TTL(time.Hour), 400, "invalid_ttl", "300000"},
		{known, "jobs/a", redlock.TTL(0), 400, "invalid_ttl", "10"},
	} {
		client, err := redlock.New(each.config)
		must(t, err)
		_, err = client.Lock(background, each.name, each.option)
		var refused *redlock.RefusedError
		if !errors.As(err, &refused) || refused.Status != each.status || refused.Code != each.code ||
			!strings.Contains(err.Error(), each.detail) || refused.RequestID == "" {
			t.Errorf("%s: %v", each.name, err)
		}
	}
	client, err := redlock.New(known)
	must(t, err)
	guard := lock(t, client, "jobs/a", redlock.Owner("alice"), redlock.Metadata(map[string]string{"run": "7"}))
	_, err = client.Lock(background, "jobs/a")
	var held *redlock.HeldError
	if !errors.As(err, &held) || held.Holder != "alice" || held.Status != 409 || held.RetryAfter <= 0 || held.ExpiresIn <= 0 {
		t.Errorf("%v", err)
	}
	must(t, guard.Release(background))
}

func TestAWaitIsAskedForInTurns(t *testing.T) {
	t.Parallel()
	s := start(t)
	for _, turn := range []time.Duration{
		300 * time.Millisecond,
		time.Minute, // Longer than the gateway allows, which says so.
	} {
		first := lock(t, s.client(), "a")
		client, err := redlock.New(redlock.Config{URLs: s.Gateways[:1], Turn: turn})
		must(t, err)
		_, err = client.Lock(background, "a", redlock.Wait(100*time.Millisecond))
		if !errors.As(err, new(*redlock.HeldError)) {
			t.Fatal(err)
		}
		told := make(chan struct{}, 1000)
		hear := redlock.OnWaiting(func(redlock.Waiting) { told <- struct{}{} })
		go func() {
			<-told
			// Time for further turns.
			time.Sleep(time.Second)
			_ = first.Release(background)
		}()
		guard := lock(t, client, "a", redlock.Wait(time.Hour), hear)
		if guard.FencingToken() <= first.FencingToken() {
			t.Fatalf("%d after %d", guard.FencingToken(), first.FencingToken())
		}
		must(t, guard.Release(background))
	}
}

func TestAWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	s := start(t)
	first := lock(t, s.client(), "a")
	ctx, cancel := context.WithCancelCause(background)
	why := errors.New("shutting down")
	time.AfterFunc(200*time.Millisecond, func() { cancel(why) })
	_, err := s.client().Lock(ctx, "a", redlock.Wait(patience))
	if !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
		t.Fatal(err)
	}
	must(t, first.Release(background))
	lock(t, s.client(), "a").Release(background)
}

func TestALockIsExtendedWhenNamesCannotBeResolvedAnyMore(t *testing.T) {
	t.Parallel()
	s := start(t)
	var failing atomic.Bool
	transport := redlock.NewTransport()
	dial := transport.DialContext
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if failing.Load() {
			return nil, errors.New("no name server")
		}
		return dial(ctx, network, address)
	}
	client, err := redlock.New(redlock.Config{URLs: s.Gateways[:1], HTTPClient: &http.Client{Transport: transport}})
	must(t, err)
	guard := lock(t, client, "a", kept)
	failing.Store(true)
	extended(t, guard, 3)
	must(t, guard.Check())
	must(t, guard.Release(background))
}

// stalled is a log that nobody reads.
type stalled struct {
	slog.Handler
	end chan struct{}
}

func (h stalled) Handle(context.Context, slog.Record) error {
	<-h.end
	return nil
}

func TestALogThatNobodyReadsHoldsUpNeitherTheLossNorTheRelease(t *testing.T) {
	t.Parallel()
	s := start(t)
	log := stalled{slog.Default().Handler(), make(chan struct{})}
	defer close(log.end)
	client, err := redlock.New(redlock.Config{URLs: s.Gateways, Logger: slog.New(log)})
	must(t, err)
	guard, other := lock(t, client, "a", kept), lock(t, client, "b", kept)
	s.takeAway(guard)
	closed(t, "the loss", guard.Lost())
	released := make(chan struct{})
	go func() {
		_ = guard.Release(background)
		close(released)
	}()
	closed(t, "the release", released)
	extended(t, other, 1)
	must(t, other.Release(background))
}

func TestAReleaseWithoutAGatewayEndsAfterFiveSecondsAtMost(t *testing.T) {
	t.Parallel()
	s := start(t)
	// The longest TTL: a release that is tried until the deadline takes minutes.
	guard := lock(t, s.client(), "a", redlock.TTL(5*time.Minute))
	for index := range s.Gateways {
		s.do("stop-gateway", map[string]int{"index": index})
	}
	begin := time.Now()
	err := guard.Release(background)
	took := time.Since(begin)
	var unavailable *redlock.UnavailableError
	if !errors.As(err, &unavailable) || took > time.Minute {
		t.Fatalf("%v after %v", err, took)
	}
	for index := range s.Gateways {
		s.do("continue-gateway", map[string]int{"index": index})
	}
}

func TestAnAcquireThatNobodyAnsweredOrThatWasGivenUpLeavesNoLock(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client(s.Proxy)
	s.do("swallow", map[string]int{"count": 1_000_000})
	_, err := client.Lock(background, "unanswered", redlock.TTL(time.Minute))
	var unavailable *redlock.UnavailableError
	if !errors.As(err, &unavailable) {
		t.Fatal(err)
	}
	free := func(name string) {
		t.Helper()
		eventually(t, name+" is free", func() bool { return s.look(0, name).State == api.LockStateFree })
	}
	free("unanswered")
	ctx, cancel := context.WithTimeout(background, time.Second)
	defer cancel()
	if _, err := client.Lock(ctx, "given-up", redlock.TTL(time.Minute)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	free("given-up")
}

func TestAGuardShowsNoToken(t *testing.T) {
	t.Parallel()
	s := start(t)
	guard := lock(t, s.client(), "jobs/secret", kept)
	defer func() { must(t, guard.Release(background)) }()
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("got it", "guard", guard)
	var structured strings.Builder
	slog.New(slog.NewJSONHandler(&structured, nil)).Info("got it", "guard", guard)
	all := []string{log.String(), structured.String()}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
		all = append(all, fmt.Sprintf(verb, guard))
	}
	if nested := fmt.Sprintf("%+v", struct{ Guard *redlock.Guard }{guard}); strings.Contains(nested, guard.Token()) {
		t.Errorf("shown as %s", nested)
	}
	for _, shown := range all {
		if strings.Contains(shown, guard.Token()) || !strings.Contains(shown, "jobs/secret") {
			t.Errorf("shown as %s", shown)
		}
	}
}

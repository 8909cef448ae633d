package redlock_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

// script has the answers to each method, as statuses; the last one repeats. 0 closes the connection
// without an answer, 502 is a proxy's page.
type script map[string][]int

// scripted is a gateway that follows a script.
type scripted struct {
	URL   string
	state sync.Mutex
	// The methods and the idempotency keys of all requests.
	methods []string
	keys    []string
	// The bodies of the POSTs.
	bodies []api.AcquireBody
}

// turn makes the status of an answer to a turn of a wait, with a place in line.
func turn(position int) int {
	return turns + position
}

// turns is above all statuses.
const turns = 1000

var codes = map[int]string{
	400: "invalid_body", 401: "unauthenticated", 403: "forbidden", 404: "lock_not_found",
	409: "lock_held", 413: "body_too_large", 422: "new", 429: "rate_limited",
}

func follow(t *testing.T, script script) *scripted {
	t.Helper()
	s := &scripted{}
	server := httptest.NewServer(http.HandlerFunc(func(writer http.ResponseWriter, request *http.Request) {
		s.state.Lock()
		defer s.state.Unlock()
		s.methods = append(s.methods, request.Method)
		s.keys = append(s.keys, request.Header.Get("Idempotency-Key"))
		if request.Method == http.MethodPost {
			var body api.AcquireBody
			_ = json.NewDecoder(request.Body).Decode(&body)
			s.bodies = append(s.bodies, body)
		}
		statuses := script[request.Method]
		status := statuses[0]
		if len(statuses) > 1 {
			script[request.Method] = statuses[1:]
		}
		switch {
		case status == 0:
			panic(http.ErrAbortHandler)
		case status > turns:
			writer.WriteHeader(http.StatusConflict)
			// The short pause makes the tests fast.
			_ = json.NewEncoder(writer).Encode(map[string]any{
				"type": "t", "title": "t", "status": 409, "code": "lock_held", "detail": "d", "retry_after_ms": 10,
				"holder": "A", "acquired_at": "2026-01-02T03:04:05.678Z",
				"queue_position": status - turns, "queue_place_expires_ms": 10_000,
			})
		case status == http.StatusNoContent:
			writer.WriteHeader(status)
		case status == http.StatusBadGateway:
			writer.WriteHeader(status)
			_, _ = writer.Write([]byte("<html>"))
		default:
			waiters := int64(2)
			var body any = api.Lease{Token: "1.1", FencingToken: 1, ValidityMs: 30_000, Waiters: &waiters}
			if status >= 300 {
				body = map[string]any{"type": "t", "title": "t", "status": status, "code": codes[status], "detail": "d"}
			}
			writer.WriteHeader(status)
			_ = json.NewEncoder(writer).Encode(body)
		}
	}))
	t.Cleanup(server.Close)
	s.URL = server.URL
	return s
}

// seen returns the methods and the different idempotency keys so far.
func (s *scripted) seen() ([]string, []string) {
	s.state.Lock()
	defer s.state.Unlock()
	keys := slices.Clone(s.keys)
	slices.Sort(keys)
	return slices.Clone(s.methods), slices.Compact(keys)
}

func scriptedClient(t *testing.T, s *scripted, log *slog.Logger) *redlock.Client {
	t.Helper()
	client, err := redlock.New(redlock.Config{URLs: []string{s.URL}, Logger: log})
	must(t, err)
	return client
}

func TestRefusalAfterALostAnswerReleasesByKey(t *testing.T) {
	t.Parallel()
	for _, unanswered := range []int{0, 502} {
		for _, status := range []int{400, 401, 403, 409, 413, 422} {
			t.Run(fmt.Sprintf("%d after %d", status, unanswered), func(t *testing.T) {
				t.Parallel()
				s := follow(t, script{"POST": {unanswered, status}, "DELETE": {204}})
				_, err := scriptedClient(t, s, nil).Lock(background, "a")
				if status == 409 && !errors.As(err, new(*redlock.HeldError)) ||
					status != 409 && !errors.As(err, new(*redlock.RefusedError)) {
					t.Fatal(err)
				}
				methods, keys := s.seen()
				if !slices.Equal(methods, []string{"POST", "POST", "DELETE"}) || len(keys) != 1 {
					t.Fatalf("%v with %v", methods, keys)
				}
			})
		}
	}
}

func TestRefusalOfEveryPostReleasesNothing(t *testing.T) {
	t.Parallel()
	for _, status := range []int{403, 409} {
		s := follow(t, script{"POST": {429, status}, "DELETE": {204}})
		if _, err := scriptedClient(t, s, nil).Lock(background, "a"); err == nil {
			t.Fatal("it was granted")
		}
		if methods, _ := s.seen(); !slices.Equal(methods, []string{"POST", "POST"}) {
			t.Fatal(methods)
		}
	}
}

func TestUnansweredReleaseByKeyEndsInTime(t *testing.T) {
	t.Parallel()
	s := follow(t, script{"POST": {0, 403}, "DELETE": {0}})
	begin := time.Now()
	_, err := scriptedClient(t, s, nil).Lock(background, "a")
	// It is 2 s, and a busy machine may add some.
	if took := time.Since(begin); !errors.As(err, new(*redlock.RefusedError)) || took > 20*time.Second {
		t.Fatalf("%v after %v; 2 s at most", err, took)
	}
}

func TestRefusalAfterALostAnswerLeavesNoLock(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client(s.Proxy)
	// The transport repeats requests by itself on a connection that was used before.
	must(t, lock(t, client, "before").Release(background))
	s.do("swallow", map[string]int{"count": 1})
	s.do("refuse", map[string]int{"status": 403})
	_, err := client.Lock(background, "a", redlock.TTL(time.Minute))
	if !errors.As(err, new(*redlock.RefusedError)) {
		t.Fatal(err)
	}
	eventually(t, "the lock is free", func() bool { return s.look(0, "a").State == api.LockStateFree })
}

// unread returns a log whose pipe is full, and which nobody reads.
func unread(t *testing.T) *slog.Logger {
	t.Helper()
	reads, writes, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() {
		reads.Close()
		writes.Close()
	})
	must(t, writes.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
	if _, err := writes.Write(bytes.Repeat([]byte("x"), 1<<22)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("the pipe is not full: %v", err)
	}
	must(t, writes.SetWriteDeadline(time.Time{}))
	return slog.New(slog.NewTextHandler(writes, nil))
}

func TestUnreadLogDelaysNoReturnOfWithLock(t *testing.T) {
	t.Parallel()
	s := follow(t, script{"POST": {201}, "DELETE": {403}})
	client, returned := scriptedClient(t, s, unread(t)), make(chan struct{})
	go func() {
		defer close(returned)
		err := client.WithLock(background, "a", func(context.Context, *redlock.Guard) error { return nil })
		if err != nil {
			t.Error(err)
		}
	}()
	closed(t, "the return", returned)
}

func TestUnreadLogDelaysNoReportOfALoss(t *testing.T) {
	t.Parallel()
	s := follow(t, script{"POST": {201}, "PATCH": {404}, "DELETE": {404}})
	guard := lock(t, scriptedClient(t, s, unread(t)), "a", redlock.TTL(900*time.Millisecond))
	closed(t, "the loss", guard.Lost())
	released := make(chan struct{})
	go func() {
		_ = guard.Release(background)
		close(released)
	}()
	closed(t, "the release", released)
}

// slowLog takes a moment for each line.
type slowLog struct {
	slog.Handler
	lines chan string
}

func (h slowLog) Handle(_ context.Context, line slog.Record) error {
	time.Sleep(20 * time.Millisecond)
	h.lines <- line.Message
	return nil
}

func TestWithLockWritesItsLineBeforeItReturns(t *testing.T) {
	t.Parallel()
	s := follow(t, script{"POST": {201}, "DELETE": {403}})
	log := slowLog{slog.Default().Handler(), make(chan string, 1)}
	client := scriptedClient(t, s, slog.New(log))
	must(t, client.WithLock(background, "a", func(context.Context, *redlock.Guard) error { return nil }))
	if len(log.lines) != 1 {
		t.Fatal("a process that ends here loses the line")
	}
}

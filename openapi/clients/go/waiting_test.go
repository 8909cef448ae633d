package redlock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
)

func clientOf(t *testing.T, urls ...string) *redlock.Client {
	t.Helper()
	client, err := redlock.New(redlock.Config{URLs: urls})
	must(t, err)
	return client
}

// nowhere returns a URL where nobody listens.
func nowhere(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	listener.Close()
	return "http://" + listener.Addr().String()
}

func TestTurnsOfAWaitHaveOneKeyAndOneGateway(t *testing.T) {
	t.Parallel()
	first := follow(t, script{"POST": {turn(2), turn(2), turn(2), 201}, "DELETE": {204}})
	second := follow(t, script{"POST": {201}, "DELETE": {204}})
	var told []redlock.Waiting
	hear := redlock.OnWaiting(func(waiting redlock.Waiting) { told = append(told, waiting) })
	guard := lock(t, clientOf(t, first.URL, second.URL), "a", redlock.Wait(time.Minute), hear,
		redlock.Priority(9), redlock.Queue(redlock.QueueNewest))
	must(t, guard.Release(background))
	methods, _ := first.seen()
	if !slices.Equal(methods, []string{"POST", "POST", "POST", "POST", "DELETE"}) {
		t.Fatal(methods)
	}
	if keys := slices.Compact(first.keys[:4]); len(keys) != 1 || keys[0] == "" {
		t.Fatal(keys)
	}
	if asked, _ := second.seen(); len(asked) != 0 {
		t.Fatal(asked)
	}
	for index, ms := range []int32{1000, 5000, 5000} {
		if got := *first.bodies[index].WaitMs; got != ms {
			t.Errorf("turn %d waits %d ms, not %d", index, got, ms)
		}
		if body := first.bodies[index]; *body.Priority != 9 || *body.Queue != "newest" {
			t.Errorf("turn %d has the priority %d and the queue %q", index, *body.Priority, *body.Queue)
		}
	}
	since := time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
	want := redlock.Waiting{Name: "a", Position: 2, Holder: "A", AcquiredAt: since, Gateway: first.URL}
	if len(told) != 3 || told[0] != want {
		t.Fatal(told)
	}
}

func TestGuardShowsTheWaitersOfTheLastExtension(t *testing.T) {
	t.Parallel()
	server := follow(t, script{"POST": {201}, "PATCH": {200}, "DELETE": {204}})
	guard := lock(t, clientOf(t, server.URL), "a", kept)
	if waiters, isKnown := guard.Waiters(); isKnown {
		t.Fatal(waiters)
	}
	eventually(t, "an extension", func() bool {
		waiters, isKnown := guard.Waiters()
		return isKnown && waiters == 2
	})
	must(t, guard.Release(background))
}

func TestLostPlaceIsSaidOnce(t *testing.T) {
	t.Parallel()
	first := follow(t, script{"POST": {turn(3), 0}})
	second := follow(t, script{"POST": {turn(7), turn(6), 201}, "DELETE": {204}})
	log := slowLog{slog.Default().Handler(), make(chan string, 10)}
	client, err := redlock.New(redlock.Config{URLs: []string{first.URL, second.URL}, Logger: slog.New(log)})
	must(t, err)
	must(t, lock(t, client, "a", redlock.Wait(time.Minute)).Release(background))
	said := <-log.lines
	want := fmt.Sprintf("place in line lost: %s does not answer; now 7th in line at %s", first.URL, second.URL)
	if said != want || len(log.lines) != 0 {
		t.Fatal(said, len(log.lines))
	}
}

func TestFailedWaitGivesItsPlaceUp(t *testing.T) {
	t.Parallel()
	s := follow(t, script{"POST": {turn(2)}, "DELETE": {204}})
	_, err := clientOf(t, s.URL).Lock(background, "a", redlock.Wait(100*time.Millisecond))
	var held *redlock.HeldError
	if !errors.As(err, &held) || held.Name != "a" || held.QueuePosition != 2 || held.Holder != "A" {
		t.Fatal(err)
	}
	eventually(t, "the release", func() bool {
		methods, keys := s.seen()
		return methods[len(methods)-1] == "DELETE" && len(keys) == 1
	})
}

func TestNothingListeningIsSaidAtOnce(t *testing.T) {
	t.Parallel()
	first, second := nowhere(t), nowhere(t)
	var tries atomic.Int64
	transport := redlock.NewTransport()
	dial := transport.DialContext
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		tries.Add(1)
		return dial(ctx, network, address)
	}
	urls := []string{first, second}
	client, err := redlock.New(redlock.Config{URLs: urls, HTTPClient: &http.Client{Transport: transport}})
	must(t, err)
	for what, ask := range map[string]func() error{
		"lock":   func() error { _, err := client.Lock(background, "a"); return err },
		"status": func() error { _, err := client.Status(background, "a"); return err },
		"list":   func() error { _, err := client.List(background, redlock.ListOptions{}); return err },
	} {
		tries.Store(0)
		err := ask()
		var unavailable *redlock.UnavailableError
		// Who asks again later asks each gateway more than once.
		if count := tries.Load(); !errors.As(err, &unavailable) || count != 2 {
			t.Errorf("%s: %v after %d tries", what, err, count)
		}
		for _, url := range []string{first, second} {
			if !strings.Contains(err.Error(), url) || !strings.Contains(err.Error(), "connection refused") {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}

func TestWaitOutlastsAGatewayThatIsNotThere(t *testing.T) {
	t.Parallel()
	const wait = 3 * time.Second
	begin := time.Now()
	_, err := clientOf(t, nowhere(t)).Lock(background, "a", redlock.Wait(wait))
	took := time.Since(begin)
	// A client that awaits an answer as long as from a hung gateway gives up after 13 s.
	if !errors.As(err, new(*redlock.UnavailableError)) || took < wait || took > 12*time.Second {
		t.Fatalf("%v after %v", err, took)
	}
}

func TestTimeoutBoundsTheWholeAcquisition(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer silent.Close()
	url := "http://" + silent.Addr().String()
	client := clientOf(t, url, url)
	begin := time.Now()
	_, err = client.Lock(background, "a", redlock.Wait(patience), redlock.Timeout(time.Second))
	took := time.Since(begin)
	if !errors.As(err, new(*redlock.UnavailableError)) || took > time.Minute ||
		!strings.HasPrefix(err.Error(), `lock "a": `) || !strings.Contains(err.Error(), "did not answer within") {
		t.Fatalf("%v after %v", err, took)
	}
}

func TestWaitAndTimeoutThatCannotWorkAreRefused(t *testing.T) {
	t.Parallel()
	client := clientOf(t, "http://127.0.0.1:1")
	for want, option := range map[string]redlock.Option{
		`lock "a": the wait is -1ns; it has to be 0 or more`:       redlock.Wait(-1),
		`lock "a": the timeout is 0s; it has to be more than 0`:    redlock.Timeout(0),
		`lock "a": the timeout is -1s; it has to be more than 0`:   redlock.Timeout(-time.Second),
		`lock "a": no gateway decided: http://127.0.0.1:1/ failed`: redlock.Timeout(math.MaxInt64),
	} {
		if _, err := client.Lock(background, "a", option); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, not %s", err, want)
		}
	}
}

func TestDefaultOwnerNamesUserHostProcessAndProgram(t *testing.T) {
	t.Parallel()
	s := follow(t, script{"POST": {201}, "DELETE": {204}})
	client := clientOf(t, s.URL)
	for _, options := range [][]redlock.Option{nil, {redlock.Owner("")}, {redlock.Owner("me")}} {
		must(t, lock(t, client, "a", options...).Release(background))
	}
	host, err := os.Hostname()
	must(t, err)
	pattern := fmt.Sprintf(`^.+@%s:%d .+$`, regexp.QuoteMeta(host), os.Getpid())
	if owner := *s.bodies[0].Owner; !regexp.MustCompile(pattern).MatchString(owner) {
		t.Error(owner)
	}
	if s.bodies[1].Owner != nil || *s.bodies[2].Owner != "me" {
		t.Error(s.bodies)
	}
}

func TestConfigShowsNoKey(t *testing.T) {
	t.Parallel()
	config := redlock.Config{URLs: []string{"http://a"}, Key: "rlk_secret"}
	client, err := redlock.New(config)
	must(t, err)
	var text, structured strings.Builder
	slog.New(slog.NewTextHandler(&text, nil)).Info("made", "config", config, "client", client)
	slog.New(slog.NewJSONHandler(&structured, nil)).Info("made", "config", config, "client", client)
	encoded, err := json.Marshal(config)
	must(t, err)
	shown := []string{text.String(), structured.String(), string(encoded)}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
		shown = append(shown, fmt.Sprintf(verb, config), fmt.Sprintf(verb, &config), fmt.Sprintf(verb, client))
	}
	for _, each := range shown {
		if strings.Contains(each, "secret") {
			t.Errorf("shown as %s", each)
		}
	}
}

func TestFirstComeIsFirstServedOverSeveralTurns(t *testing.T) {
	t.Parallel()
	s := start(t)
	type heard struct {
		who     string
		waiting redlock.Waiting
	}
	places := make(chan heard, 1000)
	served := make(chan string, 2)
	wait := func(who string) {
		client, err := redlock.New(redlock.Config{URLs: s.Gateways, Turn: time.Second})
		if err == nil {
			hear := func(waiting redlock.Waiting) { places <- heard{who, waiting} }
			work := func(context.Context, *redlock.Guard) error { served <- who; return nil }
			err = client.WithLock(background, "fifo", work,
				redlock.Wait(time.Minute), redlock.Owner(who), redlock.OnWaiting(hear))
		}
		if err != nil {
			t.Error(err)
		}
	}
	place := func(who string, turns int) redlock.Waiting {
		for {
			select {
			case heard := <-places:
				if heard.who != who {
					continue
				}
				if turns--; turns == 0 {
					return heard.waiting
				}
			case <-time.After(patience):
				t.Fatalf("%s was not told of its place", who)
			}
		}
	}
	holder := s.client(s.Gateways[0])
	held := lock(t, holder, "fifo", redlock.Owner("holder"))
	var all sync.WaitGroup
	for index, who := range []string{"A", "B"} {
		all.Add(1)
		go func() {
			defer all.Done()
			wait(who)
		}()
		waiting := place(who, 1+3*index)
		if waiting.Position != index+1 || waiting.Holder != "holder" || waiting.Gateway != s.Gateways[0] {
			t.Errorf("%s: %+v", who, waiting)
		}
	}
	status, err := holder.Status(background, "fifo")
	must(t, err)
	if len(status.Waiters) != 2 || status.Waiters[0].Owner != "A" || status.WaitersTotal != 2 {
		t.Errorf("%+v", status)
	}
	must(t, held.Release(background))
	all.Wait()
	close(served)
	if first := <-served; first != "A" {
		t.Fatalf("%s was first", first)
	}
}

func TestTimeoutLeavesTimeToSayWhoHoldsTheLock(t *testing.T) {
	t.Parallel()
	s := start(t)
	guard := lock(t, s.client(), "held", redlock.Owner("alice"))
	// A busy machine may need more time for the answer than the client leaves.
	eventually(t, "an answer in time", func() bool {
		begin := time.Now()
		_, err := s.client().Lock(background, "held", redlock.Wait(patience), redlock.Timeout(3*time.Second))
		took := time.Since(begin)
		if errors.As(err, new(*redlock.UnavailableError)) {
			return false
		}
		if !errors.As(err, new(*redlock.HeldError)) || !strings.Contains(err.Error(), `lock "held": lock_held`) ||
			!strings.Contains(err.Error(), "alice") || took < 2*time.Second || took > time.Minute {
			t.Fatalf("%v after %v", err, took)
		}
		return true
	})
	must(t, guard.Release(background))
}

// decided asks again while too few masters answer. A busy machine looks like masters that hang.
func decided(t *testing.T, client *redlock.Client, name string) *redlock.LockStatus {
	t.Helper()
	var status *redlock.LockStatus
	eventually(t, "the state of "+name, func() bool {
		status = value[*redlock.LockStatus](t)(client.Status(background, name))
		return status.State != "unknown"
	})
	return status
}

func TestStatusListAndForceRelease(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	guard := lock(t, client, "jobs/a", kept, redlock.Owner("host-7"), redlock.Metadata(map[string]string{"run": "7"}))
	lock(t, client, "other")
	var page *redlock.LockList
	eventually(t, "the state of the listed lock", func() bool {
		page = value[*redlock.LockList](t)(client.List(background, redlock.ListOptions{Prefix: "jobs/", Limit: 1}))
		if len(page.Locks) != 1 {
			t.Fatalf("%+v", page)
		}
		return page.Locks[0].State != "unknown"
	})
	for _, status := range []redlock.LockStatus{page.Locks[0], *decided(t, client, "jobs/a")} {
		if status.Name != "jobs/a" || status.State != "held" || status.Owner != "host-7" || status.Metadata["run"] != "7" ||
			status.FencingToken != guard.FencingToken() || status.ExpiresIn <= 0 || status.AcquiredAt.IsZero() {
			t.Errorf("%+v", status)
		}
	}
	must(t, client.ForceRelease(background, "jobs/a"))
	closed(t, "the loss", guard.Lost())
	var refused *redlock.RefusedError
	if err := client.ForceRelease(background, "jobs/a"); !errors.As(err, &refused) || refused.Status != 404 || refused.Name != "jobs/a" {
		t.Error(err)
	}
	if status := decided(t, client, "jobs/a"); status.State != "free" || len(status.Nodes) != 3 {
		t.Errorf("%+v", status)
	}
}

const consumer = `package main

import (
	"context"
	"fmt"
	"os"

	redlock "MODULE"
)

func main() {
	client, err := redlock.New(redlock.Config{URLs: os.Args[1:]})
	if err == nil {
		err = client.WithLock(context.Background(), "jobs/consumer", func(_ context.Context, guard *redlock.Guard) error {
			status, err := client.Status(context.Background(), guard.Name())
			fmt.Println(status.FencingToken == guard.FencingToken(), guard.Name())
			return err
		})
	}
	if err != nil {
		fmt.Println(err)
	}
}
`

func TestModuleInAnEmptyFolderTakesALock(t *testing.T) {
	t.Parallel()
	s := start(t)
	module := value[string](t)(filepath.Abs("."))
	folder := t.TempDir()
	path := "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
	must(t, os.WriteFile(filepath.Join(folder, "main.go"), []byte(strings.Replace(consumer, "MODULE", path, 1)), 0o600))
	var output []byte
	for _, arguments := range [][]string{
		{"mod", "init", "example.invalid/consumer"},
		{"mod", "edit", "-require", path + "@v0.1.0", "-replace", path + "=" + module},
		{"mod", "tidy"},
		{"run", ".", s.Gateways[0]},
	} {
		command := exec.Command("go", arguments...)
		command.Dir = folder
		var err error
		if output, err = command.CombinedOutput(); err != nil {
			t.Fatalf("go %v: %v: %s", arguments, err, output)
		}
	}
	if string(output) != "true jobs/consumer\n" {
		t.Fatalf("%s", output)
	}
}

// value returns the value, or ends the test.
func value[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		must(t, err)
		return value
	}
}

// Command reader writes what a library delivers of a stream, until the lock was released:
//
//	reader LIBRARY URL
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"

	r3labs "github.com/r3labs/sse/v2"
	gosse "github.com/tmaxmax/go-sse"
)

// write writes one event, and ends the program after the last one.
func write(kind, data string) {
	line, err := json.Marshal([]string{kind, data})
	if err != nil {
		fail(err)
	}
	fmt.Println(string(line))
	if kind == "released" {
		os.Exit(0)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func main() {
	library, url := os.Args[1], os.Args[2]
	if library == "r3labs" {
		fail(r3labs.NewClient(url).SubscribeRaw(func(event *r3labs.Event) {
			write(string(event.Event), string(event.Data))
		}))
	}
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		fail(err)
	}
	connection := gosse.NewConnection(request)
	connection.SubscribeToAll(func(event gosse.Event) { write(event.Type, event.Data) })
	fail(connection.Connect())
}
